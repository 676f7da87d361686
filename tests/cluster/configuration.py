"""How the programs of a cluster are set up: their command lines, the audit policy, the administrator's kubeconfig.

Paths are relative to the cluster's folder, in which the programs run: the path of a Unix socket may have
107 characters, and a folder for tests can be deeper than that.
"""

from __future__ import annotations

import base64
import json

from cluster.pki import KeyPair

ADDRESS = "127.0.0.1"

# Requests as they arrive: the entry is there before the answer is.
_AUDIT_HEAD = """\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [ResponseStarted, ResponseComplete, Panic]
rules:
"""
# Only requests that change something.
AUDIT_WRITES = f"""\
{_AUDIT_HEAD}\
- level: Metadata
  verbs: [create, update, patch, delete, deletecollection]
- level: None
"""
AUDIT_EVERYTHING = f"""\
{_AUDIT_HEAD}\
- level: Metadata
"""

# The numbers belong to the file names: etcd insists on what looks like a host and a port.
_ETCD_CLIENTS = "unix://clients:1"
_ETCD_PEERS = "unix://peers:1"
ETCD_FLAGS = (
    "--name=etcd",
    "--data-dir=etcd",
    "--unsafe-no-fsync",
    "--log-level=warn",
    f"--listen-client-urls={_ETCD_CLIENTS}",
    f"--advertise-client-urls={_ETCD_CLIENTS}",
    f"--listen-peer-urls={_ETCD_PEERS}",
    f"--initial-advertise-peer-urls={_ETCD_PEERS}",
    f"--initial-cluster=etcd={_ETCD_PEERS}",
)


def _serving_flags(port: int) -> tuple[str, ...]:
    return (
        f"--bind-address={ADDRESS}",
        f"--secure-port={port}",
        "--permit-port-sharing",
        "--tls-cert-file=server.crt",
        "--tls-private-key-file=server.key",
    )


def api_server_flags(port: int) -> tuple[str, ...]:
    return (
        *_serving_flags(port),
        f"--advertise-address={ADDRESS}",
        # Endpoints must not be loopback addresses, and nothing here needs the Service `kubernetes`.
        "--endpoint-reconciler-type=none",
        f"--etcd-servers={_ETCD_CLIENTS}",
        "--client-ca-file=ca.crt",
        "--authorization-mode=RBAC",
        "--service-account-issuer=https://kubernetes.default.svc",
        "--service-account-signing-key-file=accounts.key",
        "--service-account-key-file=accounts.pub",
        "--service-cluster-ip-range=10.96.0.0/16",
        # Pods can be made in a namespace that no controller has given its default account.
        "--disable-admission-plugins=ServiceAccount",
        # Any time above zero makes a server that is asked to end close its watches at once; with zero it waits
        # a minute for clients to leave.
        "--shutdown-watch-termination-grace-period=1s",
        "--audit-policy-file=audit-policy.yaml",
        "--audit-log-path=logs/audit.json",
        "--audit-log-mode=blocking",
    )


def controller_manager_flags(port: int) -> tuple[str, ...]:
    return (
        *_serving_flags(port),
        "--kubeconfig=admin.kubeconfig",
        "--leader-elect=false",
        "--service-account-private-key-file=accounts.key",
        "--root-ca-file=ca.crt",
    )


def kubeconfig(server: str, authority: bytes, user: KeyPair) -> bytes:
    def encoded(pem: bytes) -> str:
        return base64.b64encode(pem).decode()

    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "tests",
        "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "administrator"}}],
        "clusters": [
            {"name": "tests", "cluster": {"server": server, "certificate-authority-data": encoded(authority)}}
        ],
        "users": [
            {
                "name": "administrator",
                "user": {
                    "client-certificate-data": encoded(user.certificate),
                    "client-key-data": encoded(user.key),
                },
            }
        ],
    }
    # JSON is YAML.
    return json.dumps(content, indent=2).encode()
