#!/bin/sh
# Packs deploy/kernels-cp311-linux-aarch64.tar.xz on an x86-64 Debian, by QEMU: as root, from a clean checkout.
#
#     deploy/pack_arm64.sh FOLDER [MIRROR]
#
# FOLDER gets an arm64 Debian of 1.5 GB; one that is there already is used again. It needs the packages
# debootstrap, qemu-user-static and binfmt-support.
set -eu
root=${1:?"FOLDER: where the arm64 system is to be"}
mirror=${2:-http://deb.debian.org/debian}
here=$(cd "$(dirname "$0")/.." && pwd)

within() { chroot "$root" /usr/bin/env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 "$@"; }

[ -x "$root/usr/bin/python3" ] ||
  debootstrap --arch=arm64 --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$root" "$mirror"
cp -L /etc/resolv.conf /etc/hosts "$root/etc/"
cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
mountpoint -q "$root/proc" || mount -t proc proc "$root/proc"
mountpoint -q "$root/dev" || mount --bind /dev "$root/dev"
trap 'umount "$root/dev" "$root/proc"' EXIT
rm -rf "$root/src"
git clone --quiet "$here" "$root/src"
[ -x "$root/venv/bin/pip" ] || within python3 -m venv /venv
within /venv/bin/pip install --quiet -c /src/requirements/live-cpu.txt --editable /src
within /venv/bin/python /src/deploy/ship_kernels.py
cp "$root/src/deploy/kernels-cp311-linux-aarch64.tar.xz" "$here/deploy/"
