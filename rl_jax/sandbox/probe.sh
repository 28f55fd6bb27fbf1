# Runs inside a sandbox, before anything else may: one line for each thing that does not hold, then "probed".
uid=$(id -u)
[ "$uid" != 0 ] || echo "programs run as root"
tr '\0' '\n' </proc/1/environ 2>/dev/null | grep -vE '^(PATH|HOME|TMPDIR|LANG|HOSTNAME|TERM|PYTHONHASHSEED|container)=' | grep -q . &&
    echo "the environment of another process is seen"
grep -vE '^ *(lo|Inter-|face)[:| ]?' /proc/net/dev | grep -q : && echo "there is a network interface beside lo"
for place in / /usr /dev /etc /dev/shm; do
    if (: >"$place/.rl_jax_probe") 2>/dev/null; then
        rm -f "$place/.rl_jax_probe"
        echo "$place can be written"
    fi
done
[ ! -r /etc/shadow ] || echo "/etc/shadow can be read"
grep -qE '^NoNewPrivs:[[:space:]]*1' /proc/self/status || echo "programs may gain privileges"
grep -qE '^CapEff:[[:space:]]*0+$' /proc/self/status || echo "programs have capabilities"
[ "$(ls -d /proc/[0-9]* | wc -l)" -lt 24 ] || echo "processes of the host are seen"
head -c 2000000 /dev/zero >fill 2>/dev/null && echo "the disk has no limit"
rm -f fill
# More processes than the limit at once; a shell that cannot fork gives up, or waits until the first have ended.
crowd='for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16; do sleep 0.2 & done; set -- /proc/[0-9]*; echo $#'
seen=$(sh -c "$crowd" 2>/dev/null)
[ "${seen:-0}" -lt 16 ] || echo "the number of processes has no limit"
echo probed
