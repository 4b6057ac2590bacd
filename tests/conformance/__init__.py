"""Byte for byte as PyTorch's libuv server, or mended on purpose and written down in `docs/quirks.md`.

What PyTorch has not at all, the extension of `docs/wire.md`, is in `extension.py`.

`vectors.json` and `vectors_badinput.json` are recordings of PyTorch 2.13.0, copied unchanged from the protocol page
(the entries of PyTorch's legacy server are for the client's tests); `divergences.py` says where our answers differ.
"""
