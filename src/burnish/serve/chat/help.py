"""The commands of a chat, as listed by ``/help``."""

HELP = """\
text                  send a message; \\ at the line end or \"\"\" for several lines
/new, /exit           new conversation (also: clear); quit (also: exit, Ctrl-D)
/image PATH           add an image to the next message
/system [text]        show or set the system message; setting it clears the chat
/set [name=value]     show or change sampling: temperature=0.2 top_p=0.9 seed=7
/think on|off|hide    turn reasoning on or off, or hide its text
/tools FILE           pass a JSON file of tools to the model; /tools off
/answer text          enter the result of a tool call
/retry, /undo, /edit  regenerate; remove the last turn; edit the last message
/adapter NAME         switch to an adapter; base: no adapter
/both NAME            compare two adapters on the last message
/tokens [p]           tokens of the last exchange; p: with probabilities
/prompt               show the last prompt as the model received it
/save [FILE]          save the conversation as a JSONL record; /load FILE
"""
