# The first program inside a sandbox: takes the files in, runs the command, sends the files out.
# Arguments: where to report (a descriptor, or the path of a fifo); bytes of the archive that stdin begins with; 1 to
# send the files out; the command. Reports R once the files are in (F if they cannot be), waits for an answer where it can
# (a descriptor is a socket), reports the archive of the files at the end, when all else was killed.
# The command gets none of the descriptors used here, and is never process 1, which signals do not end.
report=$1 size=$2 keeps=$3
shift 3
if [ -p "$report" ]; then exec 9>"$report"
elif [ "$report" = 9 ]; then asks=1
else exec 9>&"$report" {report}>&- && asks=1; fi
[ -d /box/work ] || mkdir /box/work /box/tmp || exit 1
cd /box/work || exit 1
if [ "$size" -gt 0 ]; then head -c "$size" | tar -xf - || { printf F >&9; exit 1; }; fi
printf R >&9
# No answer: who asked is gone, maybe before this could be told to end with it.
[ -z "$asks" ] || read -r -n 1 -u 9 _ || exit 1
if [ "$keeps" = 0 ] && [ $$ != 1 ]; then exec "$@" 9>&-; fi
exec 8>&2 2>/dev/null
"$@" 2>&8 8>&- 9>&-
status=$?
kill -KILL -1
[ "$keeps" = 0 ] || tar -cSf - . >&9
exit "$status"
