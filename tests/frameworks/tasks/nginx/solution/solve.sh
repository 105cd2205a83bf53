#!/bin/bash
set -e
install -d -o www-data -g www-data /srv/site
install -o www-data -m 644 page.html /srv/site/index.html
install -o www-data -m 644 missing.html /srv/site/missing.html
cat > /etc/nginx/sites-available/default <<'CONF'
server {
    listen 80 default_server;
    root /srv/site;
    access_log /var/log/nginx/site.log;
    error_page 404 /missing.html;
}
CONF
nginx -t
nginx
