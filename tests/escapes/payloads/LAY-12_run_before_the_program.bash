# This file is in the workspace, variables of the caller name it, and it is the program as well: if it
# runs twice, then the first time as what a shell reads before its program.

if [ -e ran ]; then escaped=true; else escaped=false; fi
: >ran
echo '{"case": "LAY-12", "escaped": '$escaped', "detail": "ran before the program: '$escaped'"}'
