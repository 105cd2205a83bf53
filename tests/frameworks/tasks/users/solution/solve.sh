#!/bin/bash
set -e
useradd -u 1500 -m -s /bin/bash deploy
chown -R deploy:deploy /app/src
su deploy -c "make -C /app/src"
install -m 755 /app/src/greet /usr/local/bin/greet
cat > /home/deploy/backup.sh <<'SCRIPT'
#!/bin/bash
n=1
while [ -e "/home/deploy/backup-$n.tar" ]; do n=$((n + 1)); done
tar -C /app -cf "/home/deploy/backup-$n.tar" src
SCRIPT
chmod 755 /home/deploy/backup.sh
chown deploy: /home/deploy/backup.sh
su deploy -c /home/deploy/backup.sh
su deploy -c /home/deploy/backup.sh
