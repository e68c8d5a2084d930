"""Kernels of the GPU family: cuda, hip, metal and the emulator."""
