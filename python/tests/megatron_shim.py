"""Makes Megatron-core run on a CPU, as the pilot's --cpu does. Import it first."""

from uniep.pilot.cpu import stand_in_for_cuda

stand_in_for_cuda()
