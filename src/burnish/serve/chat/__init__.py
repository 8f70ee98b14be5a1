"""``burnish chat``: chat with a model in the terminal.

command.py       the command
session.py       the conversation and its commands
backends.py      the engine in this process, or a server with OpenAI's API
console.py       terminal input and output
records.py       files that a conversation reads
help.py          the list of commands
"""
