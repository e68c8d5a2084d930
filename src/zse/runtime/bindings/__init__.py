"""ctypes tables of the GPU drivers: the functions that are used, each call checked. Nothing is opened on import."""
