#!/bin/bash
# Makes a genuine Kubernetes 1.20.2 from Debian's source package: build.sh FOLDER leaves FOLDER/bin, which
# appears when all is in it. What it needs is installed before; it may be killed at any moment.
#
# Debian ships kubectl alone, but its source package is whole, with every dependency; so nothing but the Debian mirror
# is needed. Three things stand in the way: module mode wants go.mod changed, so it is built in GOPATH mode; one file
# is generated and not in the package; and the reflect2 that the package carries crashes programs of newer compilers.
set -euo pipefail
umask 022
folder=$(realpath -m "$1")
work=$folder/build
export DEBIAN_FRONTEND=noninteractive
programs=(kube-apiserver kube-controller-manager kube-scheduler kubelet)

main() {
  [ ! -d "$work" ] || chmod -R u+w "$work"
  rm -rf "$work"
  mkdir -p "$work/tree/src/k8s.io" "$work/out"
  fetch
  mend
  compile
  # What a device plugin needs to speak to a kubelet.
  cp "$work/source/staging/src/k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1/api.proto" "$folder/deviceplugin.proto"
  rm -rf "$folder/bin"
  mv "$work/out" "$folder/bin"
  chmod -R u+w "$work"
  rm -rf "$work"
}

fetch() {
  # The package lists of the source are kept apart from the machine's own.
  local lists=$work/lists mirror
  mirror=$( (cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null || true) | grep -v '^#' |
    grep -oE 'https?://[^ ]+/debian/?([ ]|$)' | head -n 1 | tr -d ' ')
  mkdir -p "$lists/lists/partial" "$lists/cache/archives/partial"
  echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror bookworm main" >"$lists/sources.list"
  printf '%s\n' "Dir::Etc::sourcelist \"$lists/sources.list\";" 'Dir::Etc::sourceparts "/dev/null";' \
    "Dir::State::lists \"$lists/lists\";" "Dir::Cache \"$lists/cache\";" 'APT::Sandbox::User "root";' >"$lists/conf"
  cd "$work"
  APT_CONFIG=$lists/conf apt-get -q update
  APT_CONFIG=$lists/conf apt-get -q source --download-only kubernetes
  dpkg-source --no-check --extract kubernetes_1.20*.dsc source
}

mend() {
  local reflect2=vendor/github.com/modern-go/reflect2
  cd "$work/source"
  find $reflect2 -name '*.go' -delete -o -name '*.s' -delete
  find /usr/share/gocode/src/github.com/modern-go/reflect2 -maxdepth 1 \( -name '*.go' -o -name '*.s' \) \
    ! -name '*_test.go' -exec cp {} $reflect2/ \;
  ln -s "$work/source" "$work/tree/src/k8s.io/kubernetes"
}

compile() {
  export GO111MODULE=off GOPATH=$work/tree GOCACHE=$work/cache GOFLAGS='' CGO_ENABLED=0
  cd "$GOPATH/src/k8s.io/kubernetes"
  go build -o "$work/openapi-gen" k8s.io/kubernetes/vendor/k8s.io/kube-openapi/cmd/openapi-gen
  local marked
  marked=$(grep -rl --include='*.go' '+k8s:openapi-gen=' cmd pkg plugin staging/src/k8s.io |
    grep -vE '_test\.go|code-generator|kube-openapi|sample-apiserver' | xargs -n 1 dirname | sort -u |
    sed 's|^staging/src/|vendor/|; s|^|k8s.io/kubernetes/|' | paste -sd ,)
  "$work/openapi-gen" --logtostderr --report-filename "$work/violations" \
    --go-header-file vendor/k8s.io/code-generator/hack/boilerplate.go.txt --input-dirs "$marked" \
    --output-package k8s.io/kubernetes/pkg/generated/openapi --output-file-base zz_generated.openapi
  local flags='-s -w' package
  for package in component-base/version client-go/pkg/version; do
    flags+=" -X k8s.io/kubernetes/vendor/k8s.io/$package.gitVersion=v1.20.2"
    flags+=" -X k8s.io/kubernetes/vendor/k8s.io/$package.gitMajor=1"
    flags+=" -X k8s.io/kubernetes/vendor/k8s.io/$package.gitMinor=20"
  done
  # Without the clients of clouds and of Docker, which are half of all code and which no test uses.
  go build -p 2 -tags providerless,dockerless -o "$work/out/" -ldflags "$flags" "${programs[@]/#/k8s.io/kubernetes/cmd/}"
}

main
