"""The table of `test_bad_places.py`: places to launch on, and variables about a run, that cannot work."""

from collections.abc import Mapping
from typing import NamedTuple


class Bad(NamedTuple):
    """One thing that is wrong.

    Attributes:
        says: Parts of the message.
        words: What stands after the config.
        hosts: The content of hosts.yaml in the working directory; None = there is none.
        variables: Of the environment.
    """

    says: tuple[str, ...]
    words: tuple[str, ...] = ()
    hosts: bytes | str | None = None
    variables: Mapping[str, str] = {}


def hosts(content: bytes | str | None, *says: str) -> Bad:
    return Bad(says, ("--on", "ssh:hosts.yaml", "--dry-run"), hosts=content)


def pods(*overrides: str, says: str) -> Bad:
    """What is not given here is right."""
    right = ("launch.kubernetes.image=r.example.org/a:1", "launch.kubernetes.volume_claim=shared", "run.dir=run")
    return Bad((says,), (*right, *overrides, "--on", "kubernetes", "--dry-run"))


def slurm(*overrides: str, says: str) -> Bad:
    return Bad((says,), (*overrides, "--on", "slurm", "--dry-run"))


def told(*says: str, **given: str) -> Bad:
    return Bad(says, variables=given)


HOSTS = {
    "no hosts file": hosts(None, "hosts.yaml", "no such file"),
    "an empty hosts file": hosts("", "hosts.yaml", "the file is empty"),
    "a hosts file of null bytes": hosts(bytes(512), "hosts.yaml", "special characters are not allowed"),
    "a program for a hosts file": hosts(b"\x7fELF\x02\x01\xff\xfe\x00", "hosts.yaml", "not UTF-8"),
    "half a hosts file": hosts("hosts: [gpu1, {name: g", "not valid YAML: line 1"),
    "a word for a hosts file": hosts("gpu1\n", "the file must be a mapping such as {hosts: [gpu1, gpu2]}"),
    "a table for a hosts file": hosts("gpu1 slots=2\ngpu2 slots=2\n", "the file must be a mapping such as"),
    "no host": hosts("hosts:\n", "hosts must name one host at least"),
    "a host of nothing": hosts("hosts: ['']\n", "hosts.0.name='' is not the name of a host"),
    "a host of null": hosts("hosts: [null]\n", "hosts.0 must be the name of a host"),
    "a host of lists": hosts("hosts: [[gpu1]]\n", "hosts.0 must be the name of a host"),
    "a host without a name": hosts("hosts: [{}]\n", "hosts.0.name must be given"),
    "a host twice": hosts("hosts: [gpu1, gpu1]\n", "gpu1 is named twice"),
    "a host with a space": hosts("hosts: ['gpu 1']\n", "hosts.0.name='gpu 1' is not the name of a host"),
    "a host with a newline": hosts('hosts: ["gpu1\\n"]\n', "hosts.0.name must be text without control characters"),
    "a host in colours": hosts('hosts: ["\\e[31mgpu1"]\n', "control characters, not '\\x1b[31mgpu1'"),
    "a host that is an option": hosts("hosts: [-oProxyCommand=ls]\n", "is not the name of a host"),
    "a host of 300 characters": hosts(f"hosts: [{'g' * 300}]\n", "is longer than the 253 characters"),
    "no slots": hosts("hosts: [{name: gpu1, processes: -1}]\n", "hosts.0.processes must be at least 0"),
    "slots of another program": hosts("hosts: [{name: gpu1, slots: 2}]\n", "hosts.0.slots is not a key", "processes"),
    "half a slot": hosts("hosts: [{name: gpu1, processes: 1.5}]\n", "hosts.0.processes must be a whole number"),
    "slots in words": hosts("hosts: [gpu1]\nprocesses: two\n", "processes must be a whole number"),
    "no slots for all": hosts("hosts: [gpu1]\nprocesses: 0\n", "processes must be at least 1"),
    "a port beyond the last": hosts("hosts: [{name: gpu1, port: 65536}]\n", "hosts.0.port=65536 is not a port"),
    "a port below the first": hosts("hosts: [{name: gpu1, port: -22}]\n", "hosts.0.port must be at least 0"),
    "a port in words": hosts("hosts: [{name: gpu1, port: ssh}]\n", "hosts.0.port must be a whole number"),
    "a port of 5000 digits": hosts(f"hosts: [{{name: gpu1, port: {'9' * 5000}}}]\n", "hosts.yaml"),
    "a key that is none": hosts("hosts: [gpu1]\nhost: gpu2\n", "host is not a key. Did you mean hosts?"),
    "a folder in colours": hosts('hosts: [gpu1]\ndirectory: "\\e[31m/x"\n', "directory", "control characters"),
    "an interpreter with a bell": hosts('hosts: [{name: gpu1, python: "py\\a"}]\n', "python", "control characters"),
    "a variable that is none": hosts("hosts: [gpu1]\nenvironment: {A B: c}\n", "'A B' is not the name of a variable"),
    "a variable with a null byte": hosts('hosts: [gpu1]\nenvironment: {A: "b\\0c"}\n', "A", "control characters"),
    "an alias bomb": hosts("a: &a [x,x]\nhosts: [*b]\n", "undefined alias"),
    "a list that holds itself": hosts("hosts: &h [*h]\n", "hosts.yaml"),
}
"""A hosts file for `--on ssh`."""

PODS = {
    "no image": pods("launch.kubernetes.image=''", says="launch.kubernetes.image='' must name a container image"),
    "an image with a space": pods("launch.kubernetes.image='a b'", says="launch.kubernetes.image='a b' must name"),
    "an image in colours": pods('launch.kubernetes.image="a\\e[31m"', says="launch.kubernetes.image"),
    "an image that is an address of the web": pods(
        "launch.kubernetes.image=https://r.example.org/a", says="launch.kubernetes.image='https://r.example.org/a'"
    ),
    "an image with capitals": pods("launch.kubernetes.image=Team/Train", says="launch.kubernetes.image='Team/Train'"),
    "a name with capitals": pods("launch.kubernetes.name=Train", says="launch.kubernetes.name='Train' must be a label"),
    "a name with an underscore": pods("launch.kubernetes.name=a_b", says="must be a label of DNS"),
    "a name that begins with a digit": pods("launch.kubernetes.name=7b", says="must be a label of DNS"),
    "a name that ends with a dash": pods("launch.kubernetes.name=a-", says="must be a label of DNS"),
    "a name of 64 characters": pods(f"launch.kubernetes.name={'n' * 64}", says="of at most 26 characters"),
    "a namespace with a space": pods("launch.kubernetes.namespace='a b'", says="launch.kubernetes.namespace='a b'"),
    "a namespace with dots": pods("launch.kubernetes.namespace=a.b", says="launch.kubernetes.namespace='a.b'"),
    "a queue in capitals": pods("launch.kubernetes.queue=Q", says="launch.kubernetes.queue='Q' is no name"),
    "dots side by side": pods("launch.kubernetes.queue=a..b", says="launch.kubernetes.queue='a..b' is no name"),
    "no claim": pods("launch.kubernetes.volume_claim=''", says="launch.kubernetes.volume_claim must name"),
    "a claim with a slash": pods("launch.kubernetes.volume_claim=a/b", says="volume_claim='a/b' is no name"),
    "a volume at the root": pods("launch.kubernetes.mount=/", says="launch.kubernetes.mount='/' must be a folder"),
    "a volume with a colon": pods("launch.kubernetes.mount=/a:b", says="launch.kubernetes.mount='/a:b'"),
    "a volume that goes up": pods("launch.kubernetes.mount=/a/../..", says="launch.kubernetes.mount='/a/../..'"),
    "a form that is none": pods("launch.kubernetes.form=pod", says="launch.kubernetes.form"),
    "GPUs below none": pods("launch.gpus_per_process=-1", says="launch.gpus_per_process must be at least 0"),
    "half a core": pods("launch.cpus_per_process=500m", says="launch.cpus_per_process must be a whole number"),
    "two processes in a pod": pods(
        "launch.processes_per_node=2", "run.simulate=0", "strategy.data=-1", says="a pod holds one process"
    ),
    "a time in words": pods("launch.time=soon", says="launch.time='soon'"),
    "no time at all": pods("launch.time='0:00:00'", says="launch.time='0:00:00'"),
    "a variable with a dash": pods("launch.environment={A-B: c}", says="A-B"),
    "a variable with a null byte": pods('launch.environment={A: "b\\0"}', says="launch.environment"),
    "to wait": pods("--wait", says="--wait"),
}
"""The section launch of a config, for `--on kubernetes`."""

SLURM = {
    "no nodes": slurm("launch.nodes=0", says="launch.nodes must be at least 1"),
    "nodes in words": slurm("launch.nodes=many", says="launch.nodes must be a whole number"),
    "an account of two lines": slurm('launch.slurm.account="a\\nb"', says="launch.slurm.account"),
    "an account with a space": slurm("launch.slurm.account='a b'", says="launch.slurm.account"),
    "an option that is none": slurm("launch.slurm.options=['-x']", says="launch.slurm.options"),
    "a time in words": slurm("launch.time=soon", says="launch.time='soon' is no time limit"),
    "restarts below none": slurm("launch.slurm.restarts=-1", says="launch.slurm.restarts must be at least 0"),
}
"""The same for `--on slurm`."""

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n1,n2"}
VARIABLES = {
    "a rank of JAX alone": told("JAX_PROCESS_ID says that this is process 1", JAX_PROCESS_ID="1"),
    "a count of JAX alone": told("JAX_NUM_PROCESSES says that there are 2", JAX_NUM_PROCESSES="2"),
    "an address of JAX alone": told("JAX_COORDINATOR_ADDRESS=a:1 says where", JAX_COORDINATOR_ADDRESS="a:1"),
    "a count of JAX below none": told("JAX_NUM_PROCESSES='-2'", JAX_NUM_PROCESSES="-2", JAX_PROCESS_ID="0"),
    "a count of JAX in words": told("JAX_NUM_PROCESSES='two'", JAX_NUM_PROCESSES="two", JAX_PROCESS_ID="0"),
    "a rank of JAX beyond the last": told(
        "JAX_PROCESS_ID=2 must be in 0 .. JAX_NUM_PROCESSES - 1 = 1",
        JAX_COORDINATOR_ADDRESS="a:1",
        JAX_NUM_PROCESSES="2",
        JAX_PROCESS_ID="2",
    ),
    "a port of JAX in words": told(
        "JAX_COORDINATOR", JAX_COORDINATOR_ADDRESS="a", JAX_COORDINATOR_PORT="http", JAX_NUM_PROCESSES="2"
    ),
    "a rank of ours in words": told(
        "SPMDKIT_LOCAL_RANK='x'", SPMDKIT_NUM_PROCESSES="2", SPMDKIT_PROCESS_ID="0", SPMDKIT_LOCAL_RANK="x"
    ),
    "devices of ours in words": told(
        "SPMDKIT_LOCAL_DEVICES='a'", SPMDKIT_NUM_PROCESSES="2", SPMDKIT_PROCESS_ID="0", SPMDKIT_LOCAL_DEVICES="a"
    ),
    "no processes of a host": told("SPMDKIT_LOCAL_PROCESSES='0'", SPMDKIT_LOCAL_PROCESSES="0"),
    "a local rank alone": told("SPMDKIT_LOCAL_RANK", SPMDKIT_LOCAL_RANK="1"),
    "a local rank beyond the last": told(
        "SPMDKIT_LOCAL_RANK=2 must be in 0 .. SPMDKIT_LOCAL_PROCESSES - 1 = 1",
        SPMDKIT_JOB_ADDRESSES="a:1",
        SPMDKIT_NUM_PROCESSES="2",
        SPMDKIT_PROCESS_ID="0",
        SPMDKIT_LOCAL_RANK="2",
        SPMDKIT_LOCAL_PROCESSES="2",
        SPMDKIT_SIMULATE="4",
    ),
    "counts that differ": told(
        "they contradict each other",
        SPMDKIT_NUM_PROCESSES="2",
        SPMDKIT_PROCESS_ID="0",
        SPMDKIT_JOB_ADDRESSES="a:1",
        JAX_NUM_PROCESSES="3",
    ),
    "ranks that differ": told(
        "they contradict each other",
        SPMDKIT_NUM_PROCESSES="2",
        SPMDKIT_PROCESS_ID="0",
        SPMDKIT_JOB_ADDRESSES="a:1",
        JAX_PROCESS_ID="1",
    ),
    "addresses that differ": told(
        "they contradict each other",
        SPMDKIT_NUM_PROCESSES="2",
        SPMDKIT_PROCESS_ID="0",
        SPMDKIT_JOB_ADDRESSES="a:1",
        JAX_COORDINATOR_ADDRESS="b:1",
    ),
    "a batch script of Slurm": told("this is the batch script itself", SLURM_JOB_ID="7", SLURM_NTASKS="2"),
    "a task of Slurm without a count": told("SLURM_PROCID", **STEP, SLURM_PROCID="1"),
    "a task of Slurm in words": told("SLURM_PROCID='x'", **STEP, SLURM_PROCID="x", SLURM_STEP_NUM_TASKS="2"),
    "a task of Slurm below none": told("SLURM_PROCID='-1'", **STEP, SLURM_PROCID="-1", SLURM_STEP_NUM_TASKS="2"),
    "a task of Slurm beyond the last": told("SLURM_PROCID=5 must be in 0", **STEP, SLURM_PROCID="5", SLURM_NTASKS="2"),
    "tasks of Slurm in words": told("SLURM_STEP_NUM_TASKS='x'", **STEP, SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="x"),
    "half a list of nodes": told(
        "SLURM_STEP_NODELIST", **{**STEP, "SLURM_STEP_NODELIST": "n[1-"}, SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="2"
    ),
    "a billion nodes": told(
        "SLURM_STEP_NODELIST",
        **{**STEP, "SLURM_STEP_NODELIST": "n[1-999999999]"},
        SLURM_PROCID="0",
        SLURM_STEP_NUM_TASKS="2",
    ),
    "a rank of MPI without a count": told("OMPI_COMM_WORLD_RANK", OMPI_COMM_WORLD_RANK="1"),
    "a rank of MPI in colours": told(
        "OMPI_COMM_WORLD_RANK='\\x1b[31m1'", OMPI_COMM_WORLD_RANK="\x1b[31m1", OMPI_COMM_WORLD_SIZE="2"
    ),
    "an index of a pod alone": told("JOB_COMPLETION_INDEX", JOB_COMPLETION_INDEX="1", KUBERNETES_SERVICE_HOST="a"),
    "an index of a pod in words": told("JOB_COMPLETION_INDEX='x'", JOB_COMPLETION_INDEX="x"),
    "simulated devices of no number": told(
        "SPMDKIT_SIMULATE='x'",
        SPMDKIT_NUM_PROCESSES="2",
        SPMDKIT_PROCESS_ID="0",
        SPMDKIT_JOB_ADDRESSES="a:1",
        SPMDKIT_SIMULATE="x",
    ),
}
"""The environment of `spmdkit train`."""

TABLE = {
    f"{room}: {name}": bad
    for room, table in {"ssh": HOSTS, "kubernetes": PODS, "slurm": SLURM, "environment": VARIABLES}.items()
    for name, bad in table.items()
}
