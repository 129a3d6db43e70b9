#pragma once

#include <sys/types.h>

#include <cstddef>
#include <span>

#include "io/descriptor.h"

namespace uniep {

// As send() and recv(), without waiting and without SIGPIPE; again after EINTR. A descriptor that is not -1 goes along
// with the first byte. One that comes along is put into `descriptor`, any further ones are closed; `lost`, if given,
// becomes true where this process could not take one (it has too many open).
ssize_t send_with_descriptor(int socket, std::span<const std::byte> bytes, int descriptor);
ssize_t receive_with_descriptor(int socket, std::span<std::byte> bytes, Descriptor& descriptor, bool* lost);

}  // namespace uniep
