# Makes the certificates of fronts, owners and workers, and puts them into the cluster:
#   sh $file FOLDER
# FOLDER keeps the authority. With its key anyone can pose as any pod, so keep it out of the project.
# Run it again before the certificates expire, after a year: running pods use the new ones.
set -eu
umask 077
mkdir -p "$${1:?say in which folder the authority is kept}"
cd "$$1"

make_key() {
    openssl ecparam -name prime256v1 -genkey -noout -out "$$1"
}

if [ ! -e ca.key ]; then
    make_key ca.new
    openssl req -x509 -new -key ca.new -days 3650 -subj "/CN=$name-wire-ca" -out ca.pem
    mv ca.new ca.key
fi

# issue NAME USAGE MORE: a certificate and its secret.
issue() {
    make_key "$$1.key"
    openssl req -new -key "$$1.key" -subj "/CN=$name-wire-$$1" -out "$$1.csr"
    printf '%s\n' basicConstraints=critical,CA:FALSE authorityKeyIdentifier=keyid "extendedKeyUsage=$$2" "$$3" >"$$1.ext"
    openssl x509 -req -in "$$1.csr" -CA ca.pem -CAkey ca.key -set_serial "0x$$(openssl rand -hex 16)" -days 365 \
        -extfile "$$1.ext" -out "$$1.pem"
    kubectl create secret generic "$name-wire-$$1" --from-file=tls.crt="$$1.pem" --from-file=tls.key="$$1.key" \
        --from-file=ca.crt=ca.pem --dry-run=client -o yaml | kubectl apply -f -
}

issue owner serverAuth "subjectAltName=$owners"
issue client clientAuth ""
