"""Messages of a chat: the functions that a model may call (`tools`), and its answer as a message (`message_format`).

`calls` parses the text of calls in the formats of model families, `gemma_calls` those of Gemma 4. The server and
`Engine.generate` use the same parsers.
"""
