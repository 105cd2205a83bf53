#!/bin/bash
fails=0
check() { "$@" || { echo "failed: $*"; fails=1; }; }
check test "$(curl -s http://127.0.0.1/)" = "$(cat /app/page.html)"
check test "$(curl -s -o /tmp/body -w '%{http_code}' http://127.0.0.1/nothing)" = 404
check cmp /tmp/body /app/missing.html
check grep -q '"GET /nothing HTTP/1.1" 404' /var/log/nginx/site.log
check test "$(ps -o user= -C nginx | sort -u | tr -d ' ' | paste -sd,)" = root,www-data
echo $((1 - fails)) > /logs/verifier/reward.txt
