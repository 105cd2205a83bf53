# cellwright-call NAME [JSON]: call a tool of the host and print what it gives, as JSON.  Without JSON there
# are no arguments; "-" reads them from standard input.  A shell reads this file before a program that has
# tools, since it may not be allowed to start another one; what the program starts finds it in PATH.
# What opens here, and what is said there, is in runner/watching/open_calls.py.

_cellwright_call() {
    local site="$1" kind=closed line='' failed='' IFS='
'
    shift
    case $# in
    1) set -- "$1" '{}' ;;
    2) ;;
    *)
        printf 'usage: cellwright-call NAME [JSON | -]\n' >&2
        return 2
        ;;
    esac
    {
        if [ "$2" = - ]; then
            printf '%s\0%s\0' "$site" "$1" >&7
            while read -r line; do printf '%s\n' "$line" >&7; done
            printf '%s\0' "$line" >&7
        else # whole in one write: the host wakes once
            printf '%s\0%s\0%s\0' "$site" "$1" "$2" >&7
        fi
        read -r kind <&7 || kind=closed
        if [ ! "$kind" ] && read -r line <&7; then
            printf '%s\n' "$line" || failed=1
        elif [ "${kind:=closed}" != closed ]; then
            printf '%s: ' "$kind" >&6
            while read -r line <&7; do printf '%s\n' "$line" >&6; done
        fi
    } 6>&2 2>&- 7<>/dev/tools || failed=$failed # without 2, what the shell says of a closed door is lost
    case $kind in
    '') [ ! "$failed" ] ;;
    invalid_arguments) return 2 ;;
    not_found) return 3 ;;
    denied) return 4 ;;
    budget) return 5 ;;
    not_approved) return 6 ;;
    closed)
        printf 'closed: there is no request in which to call a tool\n' >&2
        return 69
        ;;
    *) return 1 ;;
    esac
}

unset BASH_ENV # which led here
case ${BASH_VERSION:+:${SHELLOPTS-}:} in
'' | *:posix:*) # no function may have such a name
    alias cellwright-call='_cellwright_call "${LINENO-}"'
    ;;
*)
    eval 'cellwright-call() { _cellwright_call "${BASH_SOURCE[1]-}:${BASH_LINENO[0]-}" "$@"; }'
    ;;
esac
case ${0##*/} in
cellwright-call) _cellwright_call '' "$@" ;;
esac
