"""Where weights come from and go: checkpoints on disk as the parameters of our decoder, and back.

`bridge.open_model` reads, `load.load_decoder` puts into memory, `export.export_hf` writes, and
`pull.pull` fetches. Importing this package imports none of them.
"""
