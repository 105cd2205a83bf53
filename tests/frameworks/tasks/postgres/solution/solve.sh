#!/bin/bash
set -e
bin=/usr/lib/postgresql/15/bin
install -d -o postgres -g postgres -m 700 /srv/pg
su postgres -c "$bin/initdb -D /srv/pg -A trust" > /dev/null
su postgres -c "$bin/pg_ctl -D /srv/pg -l /srv/pg/log -w start" > /dev/null
su postgres -c "createdb shop"
su postgres -c "psql -qd shop" <<'SQL'
create table orders (customer text, cents int);
\copy orders from '/app/orders.csv' csv header
SQL
su postgres -c "psql -Atd shop -F ' ' -c 'select customer, sum(cents) from orders group by 1 order by 2 desc limit 1'" > /app/answer.txt
