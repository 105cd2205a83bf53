#!/bin/bash
fails=0
check() { "$@" || { echo "failed: $*"; fails=1; }; }
check test "$(cat /app/answer.txt)" = "bo 2100"
check test "$(su postgres -c "psql -Atd shop -c 'select count(*) from orders'")" = 5
check test "$(stat -c %U:%a /srv/pg)" = postgres:700
echo $((1 - fails)) > /logs/verifier/reward.txt
