"""The pilot: what a training team gains from UniEP, measured on its own GPUs. docs/pilot.md

torchrun --nproc-per-node 2 -m uniep.pilot --model tiny --cpu
"""
