"""Wrong files and command lines of a newcomer to services, budgets, accounts and credentials. The
drill `wrong_inputs.py` runs them. `MISTAKES` are those of the first hour; tests/system/
test_first_hour.py runs them, and checks that each answer names the cause and the next step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_SERVICE = "name: web\nrun: python3 -m http.server $PORT\n"


def _service(text: str) -> bytes:
    return f"{_SERVICE}service: {text}\n".encode()


def _limits(text: str) -> bytes:
    return f"run: x\nlimits: {text}\n".encode()


HUGE = "9" * 400
# Task files that are wrong in themselves.
FILES: Mapping[str, bytes] = {
    "service-list.yaml": _service("[8000]"),
    "service-text.yaml": _service("web"),
    "service-port-text.yaml": _service("{port: http}"),
    "service-port-huge.yaml": _service("{port: 70000}"),
    "service-port-digits.yaml": _service(f"{{port: {HUGE}}}"),
    "service-port-float.yaml": _service("{port: 80.5}"),
    "service-port-list.yaml": _service("{port: [80, 81]}"),
    "service-typo.yaml": _service("{port: 80, replica: 2}"),
    "service-twice.yaml": _service("{port: 80, port: 81}"),
    "service-bounds.yaml": _service("{port: 80, replicas: {min: 5, max: 2}}"),
    "service-negative.yaml": _service("{port: 80, replicas: -1}"),
    "service-many.yaml": _service("{port: 80, replicas: {min: 0, max: 1000000}}"),
    "service-targets.yaml": _service(
        "{port: 80, replicas: {max: 2, target: {rate: 1, concurrency: 2}}}"
    ),
    "service-rate-nan.yaml": _service("{port: 80, replicas: {max: 2, target: {rate: .nan}}}"),
    "service-rate-inf.yaml": _service("{port: 80, replicas: {max: 2, target: {rate: .inf}}}"),
    "service-share.yaml": _service("{port: 80, replicas: {target: {gpu_utilisation: 170%}}}"),
    "service-metric.yaml": _service("{port: 80, replicas: {target: {metric: '1 2'}}}"),
    "service-probe.yaml": _service("{port: 80, probe: health}"),
    "service-probe-url.yaml": _service("{port: 80, probe: 'http://else/where'}"),
    "service-probe-number.yaml": _service("{port: 80, probe: 7}"),
    "service-drain.yaml": _service("{port: 80, drain: soon}"),
    "service-slo.yaml": _service("{port: 80, slo: {p95: fast, availability: 200%}}"),
    "service-budget.yaml": _service("{port: 80, budget: lots}"),
    "service-residency.yaml": _service("{port: 80, residency: atlantis}"),
    "service-regions.yaml": _service("{port: 80, regions: {eu: true}}"),
    "service-schedule.yaml": _service("{port: 80}") + b"schedule: 0 3 * * *\n",
    "service-machine.yaml": _service("{port: 80}") + b"machine: box\n",
    "service-no-run.yaml": b"service: {port: 80}\n",
    "service-emoji.yaml": _service("{port: \U0001f680}"),
    "service-null.yaml": _service("{port: null}"),
    "service-date.yaml": _service("{port: 2026-01-01}"),
    "idle-text.yaml": _limits("{idle: never}"),
    "idle-negative.yaml": _limits("{idle: -5m}"),
    "idle-share.yaml": _limits("{idle: {gpu: 150%, for: 30m}}"),
    "idle-bare.yaml": _limits("{idle: {gpu: some}}"),
    "idle-for.yaml": _limits("{idle: {gpu: 5%, for: 0s}}"),
    "idle-key.yaml": _limits("{idle: {cpu: 5%}}"),
    "idle-list.yaml": _limits("{idle: [5m]}"),
    "idle-huge.yaml": _limits(f"{{idle: {HUGE}d}}"),
    "budget-huge.yaml": _limits("{budget: 1e400}"),
    "budget-nan.yaml": _limits("{budget: .nan}"),
    "budget-euro.yaml": _limits("{budget: 25\u20ac}"),
    "budget-comma.yaml": _limits("{budget: '1.000,50'}"),
    "budget-list.yaml": _limits("{budget: [5]}"),
    "budget-true.yaml": _limits("{budget: true}"),
    "duration-huge.yaml": _limits("{duration: 99999999999d}"),
    "deadline-far.yaml": _limits("{deadline: 99999-01-01T00:00Z}"),
    "deadline-number.yaml": _limits(f"{{deadline: {HUGE}}}"),
    "limits-text.yaml": _limits("12h"),
    "priority.yaml": b"run: x\npriority: 1e99\n",
    "nodes-huge.yaml": f"run: x\nnodes: {HUGE}\n".encode(),
    "nodes-hex.yaml": b"run: x\nnodes: 0xZZ\n",
    "nodes-underscore.yaml": b"run: x\nnodes: 1_0_0_0_0_0\n",
    "cpu-huge.yaml": f"run: x\nresources: {{cpu: {HUGE}}}\n".encode(),
    "memory-huge.yaml": f"run: x\nresources: {{memory: {HUGE}TB}}\n".encode(),
    "disk-huge.yaml": f"run: x\nresources: {{disk: {HUGE}}}\n".encode(),
    "gpu-huge.yaml": b"run: x\nresources: {gpu: 'H100:99999999999999999999'}\n",
    "price-huge.yaml": b"run: x\nresources: {max_price: 1e300}\n",
    "flops-huge.yaml": b"run: x\nwork: {flops: 1e999}\n",
    "param-huge.yaml": b"run: echo ${{ params.a }}\nparams: {a: {type: int, default: 1e999}}\n",
    "param-list.yaml": b"run: echo ${{ params.a }}\nparams: [a, b]\n",
    "param-open.yaml": b"run: echo ${{ params.a\nparams: {a: 1}\n",
    "param-loop.yaml": b"run: x\nparams: {a: '${{ params.b }}', b: '${{ params.a }}'}\n",
    "exit-codes.yaml": b"run: x\nretry: {exit_codes: [0, 300]}\n",
    "webhook.yaml": b"run: x\nwebhooks: [ftp://example.org]\n",
    "webhook-space.yaml": b"run: x\nwebhooks: ['https://exa mple.org:99999/']\n",
    "webhook-bracket.yaml": b"run: x\nwebhooks: ['https://[::1/']\n",
    "input-bracket.yaml": b"run: x\ninputs: [{source: 'https://[bad/', target: /data}]\n",
    "bucket.yaml": b"run: x\ninputs: [{source: 's3://', target: /data}]\n",
    "output-web.yaml": b"run: x\noutputs: [{source: a, target: 'https://example.org/x'}]\n",
    "volume.yaml": b"run: x\nvolumes: [{name: a, host: /b, path: /c}]\n",
    "volume-text.yaml": b"run: x\nvolumes: ['no-colon']\n",
    "tags-list.yaml": b"run: x\ntags: [a, b]\n",
    "tags-null.yaml": b"run: x\ntags: {team: }\n",
    "env-nul.yaml": b'run: x\nenv: {A: "a\\0b"}\n',
    "env-surrogate.yaml": b'run: x\nenv: {A: "\\ud800"}\n',
    "run-nul.yaml": b'run: "echo \\0"\n',
    "run-surrogate.yaml": b'run: "echo \\udcff"\n',
    "run-number.yaml": b"run: 7\n",
    "run-empty.yaml": b"run: ''\n",
    "name-emoji.yaml": "name: \U0001f680\nrun: x\n".encode(),
    "name-long.yaml": b"name: " + b"a" * 5000 + b"\nrun: x\n",
    "key-emoji.yaml": "run: x\n\U0001f680: 1\n".encode(),
    "key-number.yaml": b"run: x\n7: 8\n",
    "key-null.yaml": b"run: x\n~: 8\n",
    "key-list.yaml": b"run: x\n? [a, b]\n: c\n",
    "key-table.yaml": b"run: x\n{a: b}: c\n",
    "key-long.yaml": b"run: x\n" + b"k" * 20000 + b": 1\n",
    "merge.yaml": b"run: x\nlimits: {<<: *none}\n",
    "merge-text.yaml": b"run: x\nresources: {<<: text}\n",
    "self-alias.yaml": b"run: x\nresources: &a {any_of: [*a]}\n",
    "tag.yaml": b"run: !secret x\n",
    "tag-binary.yaml": b"run: !!binary aGVsbG8=\n",
    "tag-set.yaml": b"run: x\nsecrets: !!set {A, B}\n",
    "directive.yaml": b"%YAML 9.9\n---\nrun: x\n",
    "utf32.yaml": "run: x\n".encode("utf-32"),
    "carriage.yaml": b"name: a\rrun: x\rrnu: y\r",
    "separator.yaml": "name: a\u2028rnu: x\n".encode(),
    "right-to-left.yaml": "run: x\nn\u202eame: x\n".encode(),
    "escape.yaml": b'run: x\n"a\\e[2J": 1\n',
    "json.yaml": b'{"run": "x", "limits": {"budget": "5",,}}\n',
    "toml.yaml": b'[task]\nrun = "x"\n',
    "python.py": b"import torch\nprint(1)\n",
    "shell.sh": b"#!/bin/sh\n#SBATCH --gres=gpu:8\nsrun python train.py\n",
    "kubernetes.yaml": b"apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec: {containers: []}\n",
    "compose.yaml": b"services:\n  web:\n    image: nginx\n",
    "github.yaml": b"on: push\njobs: {build: {runs-on: ubuntu-latest, steps: []}}\n",
    "sky-typo.yaml": b"resources: {accelerators: A100:8, use_spott: true}\nrun: x\n",
    "sky-type.yaml": b"resources: [1, 2]\nnum_nodes: many\nfile_mounts: 7\nrun: x\n",
    "sky-mount.yaml": b"file_mounts: {/data: {name: a, mode: FAST}}\nrun: x\n",
    "sky-any.yaml": b"resources: {accelerators: T4, any_of: 7}\nrun: x\n",
    "dstack-type.yaml": b"type: volcano\ncommands: [x]\n",
    "dstack-no-type.yaml": b"commands: [x]\nresources: {gpu: 24GB}\n",
    "dstack-gpu.yaml": b"type: task\ncommands: [x]\nresources: {gpu: {name: [], count: x}}\n",
    "dstack-port.yaml": b"type: service\ncommands: [x]\nport: http\n",
    "dstack-commands.yaml": b"type: task\ncommands: echo\nnodes: two\n",
}
# Files for `cavvy serve`.
AT_SERVE: Mapping[str, bytes] = {
    "service.yaml": _service("{port: 8000}"),
    "service-no-port.yaml": _service("{replicas: 1}"),  # as in a file of SkyPilot
    "service-region.yaml": _service("{port: 8000, regions: [eu]}"),
}
# Command lines, by the exit code that they must have.
USAGE = """
serve
serve none.yaml
serve good.yaml
serve .
serve service-port-text.yaml
serve service-no-port.yaml
serve service-region.yaml
serve service-bounds.yaml --yes
serve service.yaml --name 'Bad Name'
serve service.yaml --param x
serve service.yaml -p 'A B'
run -d service.yaml
dev service.yaml
call
call web --timeout soon
call web --timeout -5
call web --timeout nan
call web / -X 'BAD METHOD'
call web / -H nocolon
call web / -H 'A\tB: c'
unserve
services show
services -o yaml
advise --since tomorrow
advise --since -5d
advise --since 99999999999d
advise --since 0000-00-00
advise -o pdf
cost --since yesterdayish
cost --by beauty
cost --by ''
cost --by user,,job
cost --by tag:
cost --since 2026-13-01
cost --since 1d --until 2d
cost statement --month 2026-13
cost statement --month last
cost statement --month 99999-01
cost reconcile
cost reconcile none.csv
cost reconcile .
budget set
budget set team
budget set team much
budget set team -5
budget set team nan
budget set team 1e400
budget set team inf
budget set 'Bad Name' 5
budget set team 5 --alert x
budget set team 5 --soft -1%
budget set team 5 --soft 90% --hard 50%
budget set team 5 --tag team
budget set team 5 --tag =x
budget set team 5 --user ''  --webhook ftp://x
budget set team 5 --webhook 'https://exa mple/'
budget set team 5 --project 'A B'
budget request team much
budget approve team x
policy set
policy set --max-price lots
policy set --max-price -1
policy set --max-price nan
policy set --gpus H1000
policy set --providers nosuch
policy set --images 'a b'
policy set --providers ''
policy set --all-projects -p a --max-price 3
policy show -p 'A B'
trust add
trust add github
trust add github --issuer x
trust add github --issuer http://example.org
trust add github --issuer https://example.org
trust add github --issuer https://example.org --audience a --claim sub
trust add github --issuer https://example.org --audience a --account ci --lifetime 1000d
trust add github --issuer https://example.org --audience a --account ci --lifetime soon
trust add github --issuer https://example.org --audience a --account ci --scope everything
trust add 'Bad Name' --issuer https://example.org --audience a --account ci
trust add people --issuer https://example.org --client-id c --group admins
trust add people --issuer https://example.org --client-id c --group admins=king
trust remove
credential set
credential set aws
credential set aws --key-file none
credential set aws --key-file .
credential set aws --key-file good.yaml --setting x
credential set nosuch --key-file good.yaml
credential set local --key-file good.yaml
credential remove
user add
user add 'A B'
user add ''
role grant
role grant someone king
role grant someone
role list -p 'A B'
project create
project create 'A B'
project create Größe
token create --expires soon
token create --expires -5d
token create --expires 99999999d
token create --scope everything
token revoke
audit list --since never
audit list --limit 0
audit list --limit 100000
audit verify none.json
audit verify .
audit verify --head x
audit verify --head 1:zz
login
login https://127.0.0.1:1 --token-file none
login https://127.0.0.1:1 --ca-file good.yaml
server adopt
server logs -n 0
machines keep box soon
machines keep box -5m
machines keep box
machines rm
quota --to x
quota nosuch
join --valid-h nan
reserve advise --nosuch
reserve
reserve advise --since soon
dev --ide emacs
dev --keep soon
dev --machine 'A B'
dev --gpu H1000
dev good.yaml extra
rm
rm --ended extra
retry
rerun
wait good --timeout -1s
wait good --timeout 1e99
diff good
events
logs good --since soon
logs good --since -1d
image build none.yaml
data convert a b
data convert nosuch:good.yaml out
data convert mds:none out
simulate serve --trace none.csv
simulate serve --trace good.yaml
simulate serve --trace binary.yaml
simulate serve --trace good.yaml --rule beauty
simulate spot --trace none
simulate spot --trace good.yaml
simulate spot --trace binary.yaml
simulate fleet --jobs good.yaml --pools good.yaml
simulate --scenario none.yaml
simulate --scenario good.yaml
simulate --scenario binary.yaml
export slurm
export slurm none.yaml
estimate --profile good.yaml
estimate --profile binary.yaml
estimate --model gpt2 --samples nan
init --template vit none/none/none
init --defaults none/none/task.yaml
completion powershell
run good.yaml --budget nan
run good.yaml --budget 1e400
run good.yaml --nodes 99999999999999999999
run good.yaml --keep -5m
run good.yaml --deadline 0
run good.yaml --as dstack
run good.yaml --as kubernetes
run good.yaml --workdir none
run good.yaml --workdir good.yaml
run good.yaml --secret 'A B'
run good.yaml --image ' '
run good.yaml --provider nosuch
run good.yaml --region atlantis
run good.yaml --max-price nan
run good.yaml --machine 'A B'
run --gpu H100:8
run -- ''
run - --
run good.yaml nowhere.yaml
validate --as nosuch good.yaml
validate good.yaml none.yaml typo.yaml
"""
FAILED = """
call web / -d -x
cost reconcile binary.yaml
audit verify binary.yaml
audit verify good.yaml
login ftp://example.org
login https://
login https://example.org:99999
logout nosuch
context use nosuch
--context nosuch ps
server adopt --database x
server adopt --database sqlite:///x
server restore none.tar
server restore good.yaml
server restore .
server backup .
server backup /none/x.tar
server setup --listen nowhere
server start --listen 1.2.3.4
server start --listen x:99999999
server start --database mysql://x
server init --url nowhere --admin a
call none
call none /path -d x
unserve none
services show none
budget show none
budget remove none
budget request none 5
budget approve none 5
trust remove none
credential remove aws
user disable none
user enable none
user remove none
role revoke none viewer -p none
role grant none viewer -p default
token revoke none
machines stop none
machines rm none --yes
machines keep none 5m
project create a --parent none
cost none
rm none
rm none --yes
"""
UNREACHABLE = """
login https://127.0.0.1:1 --token x
login http://127.0.0.1:1 --token x
login 'https://exa mple.org' --token x
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """A command line with a mistake, and what its answer must say: regular expressions of the cause
    and of the next step. `files` are written first; train.py exists always.
    """

    line: str
    cause: str
    step: str
    files: Mapping[str, str] = field(default_factory=dict)


def _run(text: str, cause: str, step: str, command: str = "run") -> Mistake:
    """A mistake in a task file."""
    files = {"task.yaml": text}
    return Mistake(line=f"{command} task.yaml", cause=cause, step=step, files=files)


MISTAKES: Sequence[Mistake] = [
    _run("run: python3 trian.py\n", "trian|empty folder", "workdir|did you mean"),
    _run("workdir: .\nrun: python3 trian.py\n", "no trian.py", "did you mean train.py"),
    _run("run: python3 -c 'import nosuch'\n", "no module nosuch", "pip install"),
    _run(
        "workdir: .\nsetup: python3 -m pip install -r requirements.txt\nrun: python3 train.py\n",
        "setup ended with exit code 1; .*no requirements.txt",
        "Could not open requirements file",
    ),
    _run("run: nosuchcommand\n", "no program `nosuchcommand`", "install it in `setup`"),
    _run("workdir: .\nrun: ./train.py\n", "train.py is not executable", r"chmod \+x"),
    _run("run: exit 3\n", "exit code 3", "exit code 3"),
    _run(
        "resources: {memory: 64MB}\nrun: python3 -c 'x = bytearray(10 ** 9)'\n",
        "out of memory",
        "limit of 64 MiB",
    ),
    _run("run: python3 train.py\ngpu: H100\n", "unknown key 'gpu'", "belongs under `resources`"),
    _run("rnu: python3 train.py\n", "unknown key 'rnu'", "did you mean `run`"),
    _run("resources: {gpu: H100:8}\nrun: echo\n", "none of the .*has H100:8", "cavvy setup"),
    _run("resources: {gpu: H1000}\nrun: echo\n", "unknown accelerator", "did you mean"),
    _run("resources: {memory: 999GB}\nrun: echo\n", "you asked for at least 999", "accept|check"),
    _run("name: My Job\nrun: echo\n", "My Job", "a-z"),
    _run("run: |\n\techo\n", "a tab cannot indent", "use spaces"),
    _run("run: echo\nenv: {A: b}\n  bad\n", "this is not YAML", "align"),
    _run("run: echo\nenv: {A: ${B}}\n", "this is not YAML", "quote the value"),
    _run("run:\n  - python3 train.py\n", "a list where one value", "one command a line"),
    _run("run: echo {{ params.lr }}; false\n", "not replace", "params.lr }}"),
    _run("run: echo $A; false\nenv: {A: $TOKEN}\n", "`env` is not expanded", "secrets: .TOKEN"),
    _run("run: cat /data/train.csv\n", "sees no /data/train.csv", "`inputs` and `volumes`"),
    _run(
        "run: echo ${{ params.lr }}\nparams: {lr: 1}\n",
        "no option --lr",
        "--param lr=VALUE",
        "run --lr 2",
    ),
    _run("secrets: [HF_TOKEN]\nrun: echo\n", "no secret HF_TOKEN", "cavvy secret set HF_TOKEN"),
    _run("workdir: nosuch\nrun: echo\n", "nosuch does not exist", "change `workdir`"),
    _run("run: echo ${{ params.lr }}\n", "unknown parameter 'lr'", "declare it under `params:`"),
    _run("name: web\nrun: x\nservice: {port: 80}\n", "describes a service", "cavvy serve"),
    _run("run: echo\n", "describes a job, not a service", "cavvy run", "serve"),
    Mistake(
        line="run job.pbs",
        cause="walltime='soon' is no length of time",
        step="such as 1:30:00",
        files={"job.pbs": "#!/bin/bash\n#PBS -l walltime=soon\nmpirun ./a.out\n"},
    ),
    Mistake(line="run nosuch.yaml", cause="does not exist", step="cavvy init"),
    Mistake(line="run", cause="expected a task file", step="cavvy run --help"),
    Mistake(line="launch task.yaml", cause="no command 'launch'", step="cavvy run"),
    Mistake(
        line="python3 train.py", cause="no command 'python3'", step="cavvy run -- python3 train"
    ),
    Mistake(line="offers --cpu 64", cause="no option --cpu", step="--cpus"),
    Mistake(line="offers --gpu h100x8", cause="unknown accelerator", step="did you mean H100:8"),
    Mistake(line="offers --json", cause="no option --json", step="-o json"),
    Mistake(line="logs nosuch", cause="no job nosuch", step="cavvy ps"),
    Mistake(line="check awss", cause="no provider 'awss'", step="did you mean 'aws'"),
    Mistake(line="quota aws", cause="'aws' is not enabled", step="cavvy setup aws"),
    Mistake(line="secret set TOKEN", cause="the value is empty", step=r"\| cavvy secret set TOKEN"),
    Mistake(line="ssh nosuch", cause="no job nosuch", step="cavvy ps"),
    Mistake(line="cost --since someday", cause="expected a duration", step="10m or 7d"),
    Mistake(line="machines stop nosuch", cause="nosuch", step="cavvy machines"),
]
