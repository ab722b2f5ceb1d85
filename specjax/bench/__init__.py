"""`specjax bench` compares methods of decoding on sets of prompts. In reading order:

sets         prompts by name or file
methods      names of methods, and the engines that run them
run          runs methods in turns, and logs each measured part
results      figures with intervals, tables and pictures
provenance   head of every record: machine, versions, commit
command      flags of `specjax bench`, and its files
tune_tree    `specjax bench tune-tree`: the fastest draft tree of a grid
"""
