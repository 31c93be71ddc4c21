"""The model server that runs on nodes if a service uses the engine `onnxruntime`. The package's
files are submitted with a service and run on nodes as `python3 -m model_server`, so they do not
import Cavvy.
"""
