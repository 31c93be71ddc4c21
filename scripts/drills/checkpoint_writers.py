"""Programs that write checkpoints all the time, for `checkpoint_cuts.py`.

Each program begins with `START`, which both its writer and its reader run; `WRITE` saves again and
again; `read()` of `READ` resumes as the program would, and returns the time at which the save of
what it found began. It raises an error if the files do not belong together.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """A program: `modules` are the packages that it needs besides Python's own."""

    start: str = ""
    write: str
    read: str
    modules: tuple[str, ...] = ()


_TRANSFORMERS = Writer(
    modules=("transformers", "accelerate", "tensorboard", "safetensors"),
    start="""
import time, torch
from transformers import Trainer, TrainerCallback, TrainingArguments

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(512, 512)
        self.register_buffer("at", torch.zeros(2, dtype=torch.float64))

    def forward(self, x, labels):
        self.at.copy_(torch.tensor([time.time(), self.at[1] + 1], dtype=torch.float64))
        time.sleep(0.05)
        return {"loss": ((self.layer(x) - labels) ** 2).mean()}

class Data(torch.utils.data.Dataset):
    __len__ = lambda self: 1_000_000
    __getitem__ = lambda self, i: {"x": torch.zeros(512), "labels": torch.zeros(512)}

class Found(TrainerCallback):
    def on_train_begin(self, args, state, control, model, **more):
        self.at, self.step = model.at.tolist()
        self.same = self.step == state.global_step > 0

    def on_step_end(self, args, state, control, **more):
        control.should_training_stop = True

def make(steps, *callbacks):
    arguments = TrainingArguments(
        ".", max_steps=1_000_000, save_steps=steps, save_total_limit=2, logging_steps=2,
        report_to="tensorboard" if steps < 1000 else "none", use_cpu=True, disable_tqdm=True,
        per_device_train_batch_size=1, ignore_data_skip=True, remove_unused_columns=False)
    return Trainer(Net(), arguments, train_dataset=Data(), callbacks=list(callbacks))
""",
    write="make(10).train()",
    read="""
def read():
    found = Found()
    make(1_000_000, found).train(resume_from_checkpoint=True)
    assert found.same, (found.at, found.step)
    return found.at
""",
)
_LIGHTNING = Writer(
    modules=("lightning", "tensorboard"),
    start="""
import glob, logging, time, torch, lightning
from lightning.pytorch import callbacks, loggers
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(512, 512)
        self.register_buffer("at", torch.zeros(2, dtype=torch.float64))

    def training_step(self, batch, index):
        self.at.copy_(torch.tensor([time.time(), self.at[1] + 1], dtype=torch.float64))
        time.sleep(0.05)
        loss = self.layer(batch).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

class Found(lightning.Callback):
    def on_train_start(self, trainer, module):
        self.at, self.step = module.at.tolist()
        self.same = self.step == trainer.global_step > 0
        trainer.should_stop = True

def make(*more, **options):
    return lightning.Trainer(
        default_root_dir=".", max_epochs=-1, accelerator="cpu", callbacks=list(more),
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=2, **options)

data = torch.utils.data.DataLoader(torch.zeros(1_000_000, 512), batch_size=1)
""",
    write="""
saver = callbacks.ModelCheckpoint(every_n_train_steps=10, save_last=True)
loggers = [loggers.CSVLogger("."), loggers.TensorBoardLogger(".")]
make(saver, logger=loggers).fit(Net(), data)
""",
    read="""
def read():
    found = Found()
    newest = max(glob.glob("**/last*.ckpt", recursive=True), key=os.path.getmtime)
    trainer = make(found, logger=False, enable_checkpointing=False)
    trainer.fit(Net(), data, ckpt_path=newest, weights_only=False)
    assert found.same, (found.at, found.step)
    return found.at
""",
)
_KERAS = Writer(
    modules=("keras",),
    start="""
import time
os.environ["KERAS_BACKEND"] = "torch"
import keras, numpy

class At(keras.layers.Layer):
    def build(self, shape):
        self.at = self.add_weight(shape=(3,), dtype="float64", trainable=False, name="at")

    def call(self, x):
        return x

class Timed(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.layers[-1].at.assign([time.time(), epoch + 1, 0])

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.05)

model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(512), At()])
model.compile("adam", "mse")
backup = keras.callbacks.BackupAndRestore("backup")
""",
    write="""
x = numpy.zeros((10, 256)), numpy.zeros((10, 512))
logs = [keras.callbacks.CSVLogger("metrics.csv"), keras.callbacks.TerminateOnNaN()]
model.fit(*x, batch_size=1, epochs=1_000_000, verbose=0, callbacks=[Timed(), backup, *logs])
""",
    read="""
def read():
    backup.set_model(model)
    backup.on_train_begin()
    at, epoch, _ = model.layers[-1].at.numpy().tolist()
    assert epoch == model._initial_epoch > 0, (epoch, model._initial_epoch)
    return at
""",
)
_ORBAX = Writer(
    modules=("orbax", "jax"),
    start="""
import time
os.environ["JAX_PLATFORMS"] = "cpu"
import numpy, orbax.checkpoint as ocp

def make():
    options = ocp.CheckpointManagerOptions(max_to_keep=2, create=False)
    return ocp.CheckpointManager(os.getcwd(), options=options)
""",
    write="""
manager, step = make(), 0
while True:
    step += 1
    state = {"at": numpy.array([time.time(), step]), "data": numpy.full(500_000, step)}
    manager.save(step, args=ocp.args.StandardSave(state))
    time.sleep(0.5)
""",
    read="""
def read():
    with make() as manager:
        step = manager.latest_step()
        state = manager.restore(step, args=ocp.args.StandardRestore())
    assert (state["data"] == step).all() and state["at"][1] == step
    return float(state["at"][0])
""",
)
_TORCH = Writer(
    modules=("torch",),
    start="import time, torch",
    write="""
data = torch.zeros(4_000_000)
while True:
    torch.save({"at": time.time(), "data": data}, "last.pt")
    time.sleep(0.4)
""",
    read="""
def read():
    return torch.load("last.pt")["at"]
""",
)
_RENAMED = Writer(
    write="""
while True:
    with open("new", "w") as file:
        file.write(json.dumps([time.time(), *[0] * 100_000]))
    os.replace("new", "last")
    time.sleep(0.1)
""",
    read="""
def read():
    return json.load(open("last"))[0]
""",
)
_PARTS = """
def save(folder, at, pause=0.05):
    os.makedirs(folder, exist_ok=True)
    for name in ("model", "optimizer", "state"):
        with open(f"{folder}/{name}", "w") as file:
            file.write("x" * 1_000_000 + f" {at}")
        time.sleep(pause)

def load(folder):
    names = ("model", "optimizer", "state")
    [at] = {open(f"{folder}/{name}").read().split()[1] for name in names}
    return float(at)

def newest(begin):
    return max((name for name in os.listdir() if name.startswith(begin)), key=number)

def number(name):
    return int(name.split("-")[1])
"""
_NUMBERED = Writer(
    start=_PARTS,
    write="""
log, step = open("train.log", "a"), 0
while True:
    step += 1
    save(f"checkpoint-{step}", time.time())
    print("saved", step, file=log, flush=True)
    shutil.rmtree(f"checkpoint-{step - 2}", ignore_errors=True)
    time.sleep(0.2)
""",
    read="""
def read():
    return load(newest("checkpoint-"))
""",
)
_TAGGED = Writer(  # as DeepSpeed does
    start=_PARTS,
    write="""
step = 0
while True:
    step += 1
    save(f"global_step-{step}", time.time())
    with open("latest", "w") as file:
        file.write(f"global_step-{step}")
    shutil.rmtree(f"global_step-{step - 2}", ignore_errors=True)
    time.sleep(0.3)
""",
    read="""
def read():
    return load(open("latest").read())
""",
)
_SHARDS = Writer(
    modules=("safetensors",),
    start="""
import torch
from safetensors.torch import load_file, save_file
""",
    write="""
while True:
    at, names = time.time(), {}
    for shard in range(3):
        name = f"model-{shard + 1:05}-of-00003.safetensors"
        save_file({f"w{shard}": torch.full((500_000,), at, dtype=torch.float64)}, name)
        names[f"w{shard}"] = name
    with open("model.safetensors.index.json", "w") as file:
        json.dump({"metadata": {"at": at}, "weight_map": names}, file)
    time.sleep(0.5)
""",
    read="""
def read():
    index = json.load(open("model.safetensors.index.json"))
    for key, name in index["weight_map"].items():
        assert (load_file(name)[key] == index["metadata"]["at"]).all(), name
    return index["metadata"]["at"]
""",
)
_HDF5 = Writer(
    modules=("h5py",),
    start="import h5py, numpy",
    write="""
while True:
    with h5py.File("states.h5", "a") as file:
        rows = file.require_dataset(
            "rows", (0, 10_000), "f8", chunks=(1, 10_000), maxshape=(None, 10_000)
        ) if "rows" not in file else file["rows"]
        rows.resize(len(rows) + 1, axis=0)
        at = time.time()
        rows[-1] = numpy.full(10_000, at)
        file.attrs["at"] = at
    time.sleep(0.3)
""",
    read="""
def read():
    with h5py.File("states.h5") as file:
        assert (file["rows"][-1] == file.attrs["at"]).all()
        return float(file.attrs["at"])
""",
)
_SQLITE = """
base = sqlite3.connect("study.db", isolation_level=None)
base.execute("pragma journal_mode = {mode}")
base.execute("create table if not exists rows (number integer primary key, at real, text text)")
while True:
    base.execute("begin")
    for _ in range(5):
        base.execute("insert into rows (at, text) values (?, ?)", (time.time(), "x" * 1000))
    base.execute("commit")
    time.sleep(0.1)
"""
_ROWS = """
def read():
    base = sqlite3.connect("study.db")
    assert base.execute("pragma integrity_check").fetchone() == ("ok",)
    rows, at = base.execute("select count(*), max(at) from rows").fetchone()
    assert rows % 5 == 0
    return at
"""
_CHUNKS = Writer(  # as zarr does
    start="import hashlib",
    write="""
def put(path, data):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path + ".partial", "wb") as file:
        file.write(data)
    os.replace(path + ".partial", path)

step = 0
while True:
    at = time.time()
    for column in range(3):
        put(f"array/c/{step}/{column}", os.urandom(5_000))
        time.sleep(0.01)
    step += 1
    put("array/zarr.json", json.dumps({"shape": [step, 3], "attributes": {"at": at}}).encode())
    time.sleep(0.3)
""",
    read="""
def read():
    about = json.load(open("array/zarr.json"))
    for row in range(about["shape"][0]):
        for column in range(3):
            assert os.path.getsize(f"array/c/{row}/{column}") == 5_000
    return about["attributes"]["at"]
""",
)
_TAR = Writer(
    start="import io, tarfile",
    write="""
while True:
    at = time.time()
    with tarfile.open("state.tar", "w|") as tar:
        for name in ("model", "optimizer", "state"):
            info = tarfile.TarInfo(name)
            data = b"x" * 1_000_000 + f" {at}".encode()
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    time.sleep(0.4)
""",
    read="""
def read():
    with tarfile.open("state.tar") as tar:
        found = [tar.extractfile(each).read().split()[1] for each in tar]
    [at] = set(found)
    assert len(found) == 3
    return float(at)
""",
)
_BEST = Writer(
    start=_PARTS,
    write="""
while True:
    save("new-best", time.time())
    shutil.rmtree("best", ignore_errors=True)
    os.rename("new-best", "best")
    time.sleep(0.2)
""",
    read="""
def read():
    return load("best")
""",
)
_LINKED = Writer(
    start=_PARTS,
    write="""
step = 0
while True:
    step += 1
    save(f"checkpoint-{step}", time.time())
    for name in ("model", "optimizer", "state"):
        os.link(f"checkpoint-{step}/{name}", f".{name}")
        os.replace(f".{name}", name)
    os.symlink(f"checkpoint-{step}", ".latest")
    os.replace(".latest", "latest")
    shutil.rmtree(f"checkpoint-{step - 2}", ignore_errors=True)
    time.sleep(0.3)
""",
    read="""
def read():
    load(".")
    return load("latest")
""",
)
_APART = Writer(
    start=_PARTS,
    write="""
while True:
    at = time.time()
    save("weights", at, pause=0.0)
    with open("state.json", "w") as file:
        json.dump({"at": at}, file)
    time.sleep(0.4)
""",
    read="""
def read():
    at = json.load(open("state.json"))["at"]
    assert load("weights") == at
    return at
""",
)
WRITERS = {
    "transformers": _TRANSFORMERS,
    "lightning": _LIGHTNING,
    "keras": _KERAS,
    "orbax": _ORBAX,
    "torch.save": _TORCH,
    "renamed file": _RENAMED,
    "numbered folders": _NUMBERED,
    "folders with a tag": _TAGGED,
    "shards with an index": _SHARDS,
    "hdf5": _HDF5,
    "sqlite wal": Writer(start="import sqlite3", write=_SQLITE.format(mode="wal"), read=_ROWS),
    "sqlite": Writer(start="import sqlite3", write=_SQLITE.format(mode="delete"), read=_ROWS),
    "chunks": _CHUNKS,
    "tar": _TAR,
    "renamed folder": _BEST,
    "links": _LINKED,
    "two folders": _APART,
}
