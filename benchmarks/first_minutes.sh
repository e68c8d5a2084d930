#!/usr/bin/env bash
# A stranger's first minutes: clone, `make serve`, first token, each with its seconds since the start.
#
#     benchmarks/first_minutes.sh [COMMIT]
#
# HOME, the environment and the model store are new; pip's cache and the default model come from this machine's when they are
# there (packages and model cached). Two cores at most. Nothing stays behind.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
pip_cache=${PIP_CACHE_DIR:-$HOME/.cache/pip} models=${ZSE_HOME:-$HOME/.cache/zse}/models
port=${PORT:-8199}
home=$(mktemp -d)
trap 'kill -- -$pid 2>/dev/null || true; rm -rf "$home"' EXIT
export HOME=$home PIP_CACHE_DIR=$pip_cache PIP_DISABLE_PIP_VERSION_CHECK=1
unset ZSE_HOME VIRTUAL_ENV PYTHONPATH
mkdir -p "$home/.cache/zse/models"
[ -d "$models/smollm2" ] && cp -r "$models/smollm2" "$home/.cache/zse/models/"
start=$(date +%s.%N)
seconds() { awk -v a="$start" -v b="$(date +%s.%N)" 'BEGIN { printf "%6.1f s", b - a }'; }

git clone --quiet "$here" "$home/zse"
cd "$home/zse"
git checkout --quiet "${1:-$(git -C "$here" rev-parse HEAD)}"
echo "$(seconds)  cloned"
set -m
taskset -c 0,1 make serve PORT="$port" >"$home/log" 2>&1 &
pid=$!
shown=0
show() {  # new lines of the log, with the time when they are seen; of a line that is written over, its last form
    total=$(wc -l <"$home/log")
    if [ "$total" -gt "$shown" ]; then
        sed -n "$((shown + 1)),${total}p" "$home/log" | sed 's/.*\r//' | cut -c1-150 | while read -r line; do echo "$(seconds)  $line"; done
        shown=$total
    fi
}
ask='{"model":"smollm2","stream":true,"messages":[{"role":"user","content":"Name three colours."}]}'
until curl -sN --max-time 60 "http://127.0.0.1:$port/v1/chat/completions" -H 'Content-Type: application/json' -d "$ask" >"$home/answer" 2>/dev/null; do
    if grep -q '"content":"[^"]' "$home/answer" 2>/dev/null; then break; fi
    kill -0 $pid 2>/dev/null || { cat "$home/log"; echo "make serve ended"; exit 1; }
    show
    sleep 0.2
done &
asker=$!
until grep -q '"content":"[^"]' "$home/answer" 2>/dev/null; do
    kill -0 $pid 2>/dev/null || { cat "$home/log"; echo "make serve ended"; exit 1; }
    sleep 0.05
done
first=$(seconds)
wait $asker || true
echo "$first  FIRST TOKEN"
echo "$(seconds)  whole answer: $(sed -n 's/.*"content":"\([^"]*\)".*/\1/p' "$home/answer" | tr -d '\n' | cut -c1-300)"
