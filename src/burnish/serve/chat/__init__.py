"""``burnish chat``: a conversation at a terminal.

chat.py          from the first word to the exit status
talk.py          the conversation, and what each typed line does
backends.py      who answers: the engine in this process, or a server with OpenAI's API
console.py        what is read from and written to the terminal
"""
