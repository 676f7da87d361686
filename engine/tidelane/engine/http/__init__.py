"""The HTTP front: OpenAI's routes over the channel to the loop, in a process of its own.

Here belongs what deals in text and in HTTP: parsing and refusing requests, chat templates, tokenising, turning tokens
back into text, stop strings, streaming, metrics. The loop knows token ids only. Nothing here imports torch or
transformers: the front starts while the model loads, and stays small.
"""
