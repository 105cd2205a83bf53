#!/bin/bash
fails=0
check() { "$@" || { echo "failed: $*"; fails=1; }; }
check test "$(id -u deploy)" = 1500
check test "$(su deploy -c greet)" = "hello from 1500"
check test "$(stat -c %U:%G /usr/local/bin/greet)" = root:root
check test "$(stat -c %U /home/deploy/backup.sh)" = deploy
for n in 1 2; do
    check test "$(tar -tvf /home/deploy/backup-$n.tar | awk '{print $2}' | sort -u)" = deploy/deploy
done
check test ! -e /home/deploy/backup-3.tar
check test "$(tar -C /tmp -xf /home/deploy/backup-1.tar && stat -c %u /tmp/src/greet.c)" = 1500
echo $((1 - fails)) > /logs/verifier/reward.txt
