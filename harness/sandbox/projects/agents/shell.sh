#!/bin/sh
# The shell of pi: each command runs as `cellwright exec --shell LINE`.  pi starts it as SHELL -c LINE.
[ $# -eq 2 ] && [ "$1" = -c ] || { echo "cellwright: must be started as SHELL -c LINE" >&2; exit 2; }
exec {cellwright} exec --shell "$2"
