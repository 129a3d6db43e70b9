"""What test_megatron.py starts for each other version of Megatron-core: most checks, in one go.

megatron_version_checks.py VERSION
"""

import sys

import megatron_shim  # noqa: F401

# isort: split
import megatron.core

import megatron_checks
import megatron_graph_checks
import megatron_option_checks
import megatron_parallel_checks
from distributed_checks import run_checks

LONG = {"check_router_options", "check_shared_experts_and_recomputation", "check_context_parallelism"}

if __name__ == "__main__":
    assert megatron.core.__version__.split("+")[0] == sys.argv[1], (megatron.core.__version__, megatron.core.__file__)
    # Those with process groups of their own are the last ones.
    modules = (megatron_checks, megatron_option_checks, megatron_graph_checks, megatron_parallel_checks)
    names = {name: one for module in modules for name, one in vars(module).items()}
    sys.exit(run_checks({name: one for name, one in names.items() if name not in LONG}, megatron_checks.set_up))
