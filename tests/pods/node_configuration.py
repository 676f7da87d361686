"""How the programs of a node are set up: its addresses, command lines and configuration files.

All of it lives in a network namespace of its own, so addresses and ports are always the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

NAME = "node-a"
ADDRESS = "10.245.0.1"
PODS = "10.244.0.0/24"
SERVICES = "10.96.0.0/16"
# The first of SERVICES: the API server gives it to the Service `kubernetes`.
API_SERVICE = "10.96.0.1"
API_SERVER = f"https://{ADDRESS}:6443"
DOMAIN = "cluster.local"
PAUSE_IMAGE = "docker.io/tidelane/pause:1"
API_NAMES = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", f"kubernetes.default.svc.{DOMAIN}")

# Process 1 of the namespaces. Ignored, the children that it is left with vanish when they end.
INIT = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); [signal.pause() for _ in iter(int, 1)]"


def setup_script(folder: Path, python: str) -> str:
    """What process 1 does before it waits: the mounts and the network that only the node sees."""
    return f"""
set -eu
mount --bind {folder}/log /var/log
# Pods' folders of the node, as /var/lib/tidelane, are written here and not to the machine.
mount -t overlay overlay -o lowerdir=/var/lib,upperdir={folder}/lib,workdir={folder}/lib-work /var/lib
mkdir -p /run/netns /run/containerd
mount -t tmpfs netns /run/netns
mount -t tmpfs containerd /run/containerd
mount --bind {folder}/resolv.conf /etc/resolv.conf
ip link set lo up
ip link add node0 type bridge
ip address add {ADDRESS}/24 dev node0
ip link set node0 up
# Not a default route: nothing can leave, and a look for a cloud's metadata fails at once instead of after seconds.
ip route add {SERVICES} dev node0
sysctl -qw net.ipv4.ip_forward=1 net.bridge.bridge-nf-call-iptables=1 net.ipv4.conf.all.route_localnet=1
touch {folder}/ready
exec {python} -I -S -c '{INIT}'
"""


def environment(debian: Path) -> Mapping[str, str]:
    """So that the programs of the unpacked packages find each other and their libraries."""
    usr = debian / "usr"
    return {
        "PATH": f"{usr}/sbin:{usr}/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LD_LIBRARY_PATH": f"{usr}/lib/x86_64-linux-gnu",
        "XTABLES_LIBDIR": f"{usr}/lib/x86_64-linux-gnu/xtables",
        "HOME": "/root",
    }


def api_server_flags() -> tuple[str, ...]:
    return (
        "--bind-address=0.0.0.0",
        f"--advertise-address={ADDRESS}",
        "--secure-port=6443",
        "--tls-cert-file=server.crt",
        "--tls-private-key-file=server.key",
        "--client-ca-file=ca.crt",
        "--etcd-servers=http://127.0.0.1:2379",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        f"--service-cluster-ip-range={SERVICES}",
        "--service-account-issuer=https://kubernetes.default.svc",
        "--service-account-signing-key-file=accounts.key",
        "--service-account-key-file=accounts.pub",
        # By name, exec and logs would ask a DNS that does not know the node.
        "--kubelet-preferred-address-types=InternalIP",
        "--kubelet-client-certificate=admin.crt",
        "--kubelet-client-key=admin.key",
    )


ETCD_FLAGS = (
    "--name=etcd",
    "--data-dir=etcd",
    "--unsafe-no-fsync",
    "--log-level=warn",
    "--listen-client-urls=http://127.0.0.1:2379",
    "--advertise-client-urls=http://127.0.0.1:2379",
    "--listen-peer-urls=http://127.0.0.1:2380",
    "--initial-advertise-peer-urls=http://127.0.0.1:2380",
    "--initial-cluster=etcd=http://127.0.0.1:2380",
)
CONTROLLER_MANAGER_FLAGS = (
    "--kubeconfig=admin.kubeconfig",
    "--leader-elect=false",
    "--use-service-account-credentials=true",
    "--service-account-private-key-file=accounts.key",
    "--root-ca-file=ca.crt",
    "--cert-dir=certificates",
)
SCHEDULER_FLAGS = ("--kubeconfig=admin.kubeconfig", "--leader-elect=false", "--cert-dir=certificates")
PROXY_FLAGS = (
    "--kubeconfig=admin.kubeconfig",
    "--proxy-mode=iptables",
    f"--hostname-override={NAME}",
    "--cluster-cidr=10.244.0.0/16",
    # To write these settings is not allowed in a network namespace, and nothing here needs them.
    "--conntrack-max-per-core=0",
    "--conntrack-tcp-timeout-established=0",
    "--conntrack-tcp-timeout-close-wait=0",
    # Below zero wants a right that a container that we run in may lack.
    "--oom-score-adj=0",
)


def kubelet_flags() -> tuple[str, ...]:
    return (
        "--config=kubelet.yaml",
        "--kubeconfig=kubelet.kubeconfig",
        "--root-dir=/var/lib/kubelet",
        "--cert-dir=certificates",
        f"--hostname-override={NAME}",
        f"--node-ip={ADDRESS}",
    )


def kubelet(folder: Path, cgroup: str) -> str:
    return json.dumps(
        {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(folder / "ca.crt")},
            },
            "authorization": {"mode": "Webhook"},
            "containerRuntimeEndpoint": f"unix://{folder}/containerd.sock",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": cgroup,
            "failSwapOn": False,
            "clusterDNS": [ADDRESS],
            "clusterDomain": DOMAIN,
            "resolvConf": str(folder / "resolv.conf"),
            # Images were imported and can be had nowhere again.
            "imageGCHighThresholdPercent": 100,
            "evictionHard": {"nodefs.available": "1%", "imagefs.available": "1%", "memory.available": "200Mi"},
            "oomScoreAdj": 0,
            "volumePluginDir": str(folder / "volume-plugins"),
            "nodeStatusUpdateFrequency": "2s",
            "syncFrequency": "5s",
        }
    )


def containerd(folder: Path, debian: Path) -> str:
    cri = 'plugins."io.containerd.grpc.v1.cri"'
    return f"""
version = 2
root = "{folder}/containerd"
state = "/run/containerd/state"
[grpc]
  address = "{folder}/containerd.sock"
[{cri}]
  sandbox_image = "{PAUSE_IMAGE}"
  # Else no container starts without CAP_SYS_RESOURCE.
  restrict_oom_score_adj = true
  [{cri}.containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [{cri}.containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [{cri}.containerd.runtimes.runc.options]
        SystemdCgroup = false
        BinaryName = "{debian}/usr/sbin/runc"
  [{cri}.cni]
    bin_dir = "{debian}/usr/lib/cni"
    conf_dir = "{folder}/cni"
"""


def pod_network(folder: Path) -> str:
    addresses = {
        "type": "host-local",
        "dataDir": f"{folder}/addresses",
        "ranges": [[{"subnet": PODS}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {"type": "bridge", "bridge": "pods0", "isGateway": True, "hairpinMode": True, "ipam": addresses}
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return json.dumps({"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge, ports]})


def dns() -> str:
    return f"""
{DOMAIN}:53 {{
    bind {ADDRESS}
    errors
    kubernetes {DOMAIN} {{
        kubeconfig admin.kubeconfig
        ttl 1
    }}
}}
"""
