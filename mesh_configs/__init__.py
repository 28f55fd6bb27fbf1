"""One file per topology; `get_config(arg="")` is settings.MeshSettings as a ConfigDict.

Files hold data and import ml_collections only. A key left out has settings.py's default.
"""
