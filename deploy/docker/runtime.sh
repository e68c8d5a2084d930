#!/bin/sh
# The last stage of an image: Python, certificates for `zse pull`, a user without rights, a folder for models.
set -eu
apt-get update -qq
apt-get install -y -qq --no-install-recommends ca-certificates python3
rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/cache/apt/archives/*.deb /var/cache/debconf/*-old /var/log/*.log /var/log/apt
rm -rf /usr/lib/python3*/test /usr/lib/python3*/pydoc_data
useradd --uid 10001 --no-create-home --home-dir /models --shell /usr/sbin/nologin zse
install -d -o zse -g zse /models
