"""Hugging Face folders: config.json, tensor names, safetensors in and out.

`architecture` reads and writes config.json, `names` says which tensors make up which parameter, `load` and `export`
move the weights. Kinds of decoders use `keys`; that, `names` and `architecture` need no torch.
"""
