#!/bin/sh
# The build stage of an image: /opt/zse becomes an environment with the server, its packages by hash and compiled kernels. In the
# folder of the sources, as root, on Debian 12.
#   build.sh                    CPU kernels of every level
#   build.sh sm_80 sm_90a ...   and GPU kernels of these architectures (NVRTC compiles them here and stays behind)
set -eu
apt-get update -qq
apt-get install -y -qq --no-install-recommends ca-certificates gcc libc6-dev python3 python3-venv
python3 -m venv /opt/zse
/opt/zse/bin/pip install --quiet --require-hashes --only-binary :all: --requirement requirements.lock
ZSE_BUILD_ISA=all /opt/zse/bin/pip install --quiet --no-deps --no-build-isolation .
# PDF documents are read by 9 MB, images in requests by 20, for which an image with GPU kernels has no room (250 MB).
for lock in requirements-pdf.lock requirements-images.lock; do
    [ $# -gt 0 ] || /opt/zse/bin/pip install --quiet --require-hashes --only-binary :all: --requirement "$lock"
done
if [ $# -gt 0 ]; then
    awk '/^nvidia-cuda-nvrtc==/ { of = 1 } of { print; if ($0 !~ /\\$/) exit }' requirements-test.lock > /tmp/nvrtc.lock
    /opt/zse/bin/pip install --quiet --require-hashes --only-binary :all: --target /tmp/nvrtc --requirement /tmp/nvrtc.lock
    PYTHONPATH=/tmp/nvrtc /opt/zse/bin/python scripts/make_gpu_wheel.py "$@" --out /tmp/wheels
    /opt/zse/bin/pip install --quiet --no-deps /tmp/wheels/*.whl
fi
# What builds and tests others is not needed to serve; pip is, by `zse pull`. Bytecode stays: the server's user cannot write it.
# tokenizers names huggingface_hub, for downloads that zse makes itself: it and what only it needs are 35 MB.
/opt/zse/bin/pip uninstall --quiet --yes huggingface-hub hf-xet fsspec filelock pyyaml tqdm httpx2 httpcore2 anyio click h11 idna truststore packaging
/opt/zse/bin/pip uninstall --quiet --yes setuptools
find /opt/zse -depth -type d -name tests -exec rm -rf {} +
find /opt/zse -name '*.pyi' -delete
find /opt/zse -depth -type d -path '*/pip/*' -name __pycache__ -exec rm -rf {} +
rm -rf /opt/zse/lib/python3*/site-packages/numpy/f2py /opt/zse/lib/python3*/site-packages/numpy/distutils
