# The two commands that a newcomer needs: `make demo` and `make test`.
BUILD ?= build/release
JOBS ?= $(shell nproc)

.PHONY: all setup build demo test test-cpu test-compile test-performance test-gpu test-two-gpus test-python python soak tsan asan fuzz tidy format check-format install portable clean

all: build

setup:
	scripts/setup.sh

$(BUILD)/build.ninja: CMakeLists.txt CMakePresets.json
	scripts/setup.sh
	cmake --preset release -B $(BUILD)

build: $(BUILD)/build.ninja
	cmake --build $(BUILD) -j $(JOBS)

# A small MoE language model, trained on real text by four ranks, overlapped and sequentially, with the same bits.
demo: $(BUILD)/build.ninja
	cmake --build $(BUILD) -j $(JOBS) --target uniep_command
	$(BUILD)/uniep train --ranks 4 --compare sequential

test: build
	ctest --test-dir $(BUILD) -j $(JOBS) --output-on-failure
	scripts/python_tests.sh $(BUILD)

# The lanes of the C++ tests, and what each is for: CONTRIBUTING.md
test-cpu test-compile: test-%: build
	ctest --test-dir $(BUILD) -j $(JOBS) --output-on-failure -L '^$*$$'

# One after the other: they have the processors, or the GPUs, to themselves.
test-performance test-gpu: test-%: build
	ctest --test-dir $(BUILD) --output-on-failure -L '^$*$$'

test-two-gpus: build
	ctest --test-dir $(BUILD) --output-on-failure -L '^two_gpus$$'

# The Python package's tests alone: docs/pytorch_reference.md
test-python: build
	scripts/python_tests.sh $(BUILD)

# The Python package's source distribution and wheel, in build/dist, built and checked: docs/pytorch.md
python: setup
	scripts/python_wheel.sh

# As many random combinations as one likes: make soak COMBINATIONS=100000 SEED=1
COMBINATIONS ?= 2000
CHECKS ?= 10000
SEED ?= 1
soak: build
	UNIEP_TEST_COMBINATIONS=$(COMBINATIONS) UNIEP_TEST_SEED=$(SEED) $(BUILD)/tests/engine_tests --gtest_filter='Bitwise.*'
	UNIEP_TEST_CHECKS=$(CHECKS) UNIEP_CACHE_DIR= $(BUILD)/tests/layer_tests --gtest_filter='Verifier.HasNoFalseAlarm*'

tsan:
	scripts/sanitize.sh thread

asan:
	scripts/sanitize.sh address,undefined

fuzz:
	scripts/fuzz.sh

tidy: setup
	scripts/tidy.sh

format:
	git ls-files '*.h' '*.cpp' '*.c' '*.cu' '*.cuh' | xargs clang-format -i

check-format:
	git ls-files '*.h' '*.cpp' '*.c' '*.cu' '*.cuh' | xargs clang-format --dry-run --Werror

PREFIX ?= /usr/local
install: build
	cmake --install $(BUILD) --prefix $(PREFIX)

portable:
	scripts/portable.sh

clean:
	rm -rf build
