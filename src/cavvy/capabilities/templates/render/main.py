"""A short film is rendered by Blender's Cycles, frame by frame, and encoded.

    python main.py --blend film.blend

Without a file, the program builds one: a ring of glossy balls that turns around a torus. Each
frame is a shard with its own picture, and a later start renders only those that are missing.
Blender comes as the Python package bpy, each release of which runs on one version of Python.
"""

import argparse
import math
import os
import subprocess
import time
from pathlib import Path

import bpy
from imageio_ffmpeg import get_ffmpeg_exe

FOLDER = Path(os.environ.get("CAVVY_CHECKPOINT_DIR", "checkpoints"))
RESULTS = Path("results")


def paint(thing: bpy.types.Object, colour: tuple[float, float, float]) -> None:
    material = bpy.data.materials.new("paint")
    material.use_nodes = True
    surface = material.node_tree.nodes["Principled BSDF"]
    surface.inputs["Base Color"].default_value = (*colour, 1)
    surface.inputs["Roughness"].default_value = 0.15
    thing.data.materials.append(material)


def build(frames: int) -> None:
    """Replace the scene by one with a camera, a light, a floor and a ring that turns once."""
    bpy.ops.wm.read_factory_settings(use_empty=True)
    film = bpy.data.scenes[0]
    film.world = bpy.data.worlds.new("sky")
    bpy.ops.object.light_add(type="SUN", rotation=(0.6, 0.3, 0))
    bpy.context.object.data.energy = 3
    bpy.ops.object.camera_add(location=(0, -8, 4.5), rotation=(math.radians(62), 0, 0))
    film.camera = bpy.context.object
    bpy.ops.mesh.primitive_plane_add(size=60, location=(0, 0, -0.8))
    paint(bpy.context.object, (0.8, 0.8, 0.85))
    bpy.ops.mesh.primitive_torus_add(major_radius=1, minor_radius=0.35)
    paint(bpy.context.object, (0.9, 0.5, 0.1))
    bpy.ops.object.empty_add()
    ring = bpy.context.object
    for number in range(6):
        turn = number * math.tau / 6
        place = (2.4 * math.cos(turn), 2.4 * math.sin(turn), 0)
        bpy.ops.mesh.primitive_uv_sphere_add(radius=0.6, location=place)
        bpy.ops.object.shade_smooth()
        bpy.context.object.parent = ring
        paint(bpy.context.object, (number / 6, 0.3, 1 - number / 6))
    for frame, angle in ((1, 0.0), (frames + 1, math.tau)):
        ring.rotation_euler.z = angle
        ring.keyframe_insert("rotation_euler", frame=frame)
    film.frame_start, film.frame_end = 1, frames


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blend", type=Path, help="a file of Blender; default: a scene is built")
    parser.add_argument("--frames", type=int, default=48, help="of the scene that is built")
    parser.add_argument("--samples", type=int, default=16, help="rays per pixel")
    parser.add_argument("--width", type=int, default=480)
    options = parser.parse_args()
    if options.blend:
        bpy.ops.wm.open_mainfile(filepath=str(options.blend))
    else:
        build(max(options.frames, 1))
    film = bpy.data.scenes[0]
    film.render.engine, film.cycles.samples, film.cycles.seed = "CYCLES", options.samples, 0
    film.render.resolution_x = options.width // 2 * 2
    film.render.resolution_y = options.width * 9 // 32 * 2
    film.render.resolution_percentage = 100
    film.render.image_settings.file_format = "PNG"
    devices = bpy.context.preferences.addons["cycles"].preferences
    for kind in ("OPTIX", "CUDA", "HIP"):
        if any(each.type == kind for each in devices.get_devices_for_type(kind) or ()):
            devices.compute_device_type, film.cycles.device = kind, "GPU"
            for each in devices.devices:
                each.use = each.type == kind
            break
    FOLDER.mkdir(parents=True, exist_ok=True)
    RESULTS.mkdir(exist_ok=True)
    name = f"frame-{options.width}-{options.samples}"
    numbers = range(film.frame_start, film.frame_end + 1)
    files = [FOLDER / f"{name}-{number:05}.png" for number in numbers]
    known = [file.exists() for file in files]
    print(f"{sum(known)} of {len(files)} frames are there", flush=True)
    began = time.monotonic()
    for done, (number, file) in enumerate(zip(numbers, files, strict=True), 1):
        if not file.exists():
            film.frame_set(number)
            film.render.filepath = str((FOLDER / "half.png").absolute())
            bpy.ops.render.render(write_still=True)
            (FOLDER / "half.png").replace(file)
        print(f'CAVVY_PROGRESS {{"done": {done}, "total": {len(files)}}}', flush=True)
    seconds, fresh = time.monotonic() - began, known.count(False)
    listed, target = FOLDER / "frames.txt", RESULTS / "film.mp4"
    listed.write_text("".join(f"file '{file.absolute()}'\nduration 0.041667\n" for file in files))
    codec = ["-r", "24", "-c:v", "libx264", "-pix_fmt", "yuv420p", "-threads", "1"]
    read = [get_ffmpeg_exe(), "-nostdin", "-v", "error", "-y", "-f", "concat", "-safe", "0"]
    exact = ["-fflags", "+bitexact", "-flags", "+bitexact"]
    subprocess.run([*read, "-i", str(listed), *codec, *exact, str(target)], check=True)
    print(f"{len(files)} frames are in {target}")
    price = float(os.environ.get("CAVVY_PRICE_USD_HR", "nan"))
    if fresh:
        print(
            f"cost: {seconds / fresh:.3g} s and ${price / 3600 * seconds / fresh:.3g} per frame "
            "(`cavvy cost` has the bill)"
        )


if __name__ == "__main__":
    main()
