"""What functions of CUDA's driver answer without a current context, about what was made in one.

python3 lab/2026-12-01-what-asks-for-a-context.py
"""

import ctypes

driver = ctypes.CDLL("libcuda.so.1")
driver.cuInit(0)
context, event, stream, host = (ctypes.c_void_p() for _ in range(4))
memory, status = ctypes.c_uint64(), ctypes.c_int()
driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
driver.cuCtxSetCurrent(context)
driver.cuEventCreate(ctypes.byref(event), 0)
driver.cuStreamCreate(ctypes.byref(stream), 1)
driver.cuMemHostAlloc(ctypes.byref(host), 4096, 0)
driver.cuMemAlloc_v2(ctypes.byref(memory), 4096)
driver.cuEventRecord(event, stream)
driver.cuCtxSetCurrent(None)
for name, arguments in (
    ("cuEventSynchronize", (event,)),
    ("cuEventQuery", (event,)),
    ("cuStreamIsCapturing", (stream, ctypes.byref(status))),
    ("cuStreamIsCapturing", (None, ctypes.byref(status))),
    ("cuStreamQuery", (stream,)),
    ("cuEventRecord", (event, stream)),
    ("cuEventDestroy_v2", (event,)),
    ("cuStreamDestroy_v2", (stream,)),
    ("cuMemFreeHost", (host,)),
    ("cuMemFree_v2", (memory,)),
):
    print(name, getattr(driver, name)(*arguments))
