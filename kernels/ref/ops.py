"""The reference kernels: plain torch, any dtype, any D, G and P; slow and obvious."""

from kvir.kernels.ops import Kernels
from kvir.kernels.ref.append import append
from kvir.kernels.ref.attend import attend_decode, attend_extend

KERNELS = Kernels(name="ref", append=append, attend_decode=attend_decode, attend_extend=attend_extend)
