"""The contract both sides share: messages, tensor codec, byte model, ledger, named random streams.

Nothing here imports torch, the server or the client.
"""

PROTOCOL_VERSION = 2
