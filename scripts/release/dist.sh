#!/usr/bin/env bash
# Build a release into dist/; called by `make dist`. Publishes nothing.
#   an sdist and a wheel, the same bytes for the same commit
#   a container image of the server, where podman or docker runs (IMAGE=no leaves it out)
#   sbom.cdx.json (CycloneDX, from requirements/base.lock), NOTES.md, SHA256SUMS
# A release itself: scripts/release/changelog.py --release X.Y.Z, set the version in
# src/cavvy/__init__.py, commit both, `git tag -s vX.Y.Z`, make dist, push the tag.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=.venv/bin/python
version=$($python -c 'import cavvy; print(cavvy.__version__)')
tag=$(git describe --tags --exact-match 2>/dev/null || true)
if [ -n "$tag" ] && [ "$tag" != "v$version" ]; then
    echo "dist: the tag $tag does not match the version $version in src/cavvy/__init__.py" >&2
    exit 1
fi
if [ -n "$(git status --porcelain)" ]; then
    echo "dist: the checkout has changes that are not committed; commit or stash them" >&2
    exit 1
fi
tools=.cache/release
if [ ! -x $tools/bin/cyclonedx-py ]; then
    $python -m venv $tools
    $tools/bin/python -m pip install --quiet --disable-pip-version-check 'build>=1.2,<2' 'cyclonedx-bom>=5,<8'
fi
rm -rf dist
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
$tools/bin/python -m build --outdir dist . >.cache/build.log 2>&1 || { tail -20 .cache/build.log >&2; exit 1; }
$tools/bin/cyclonedx-py requirements requirements/base.lock --pyproject pyproject.toml \
    --output-reproducible --output-file dist/sbom.cdx.json
$python scripts/release/changelog.py --notes "$version" >dist/NOTES.md
engine=
for each in podman docker; do
    [ "${IMAGE:-yes}" = yes ] && command -v "$each" >/dev/null && "$each" info >/dev/null 2>&1 && engine=$each && break
done
if [ -n "$engine" ]; then
    "$engine" build --quiet --tag "cavvy:$version" .
    "$engine" save "cavvy:$version" | gzip -n >"dist/cavvy-$version.image.tar.gz"
else
    echo "dist: no image: neither podman nor docker runs here, or IMAGE=no" >&2
fi
(cd dist && sha256sum -- * >SHA256SUMS)
ls -l dist
