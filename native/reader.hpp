// Integers out of Python objects: lists, tuples and any one-dimensional integer buffer.
#pragma once

#include <nanobind/nanobind.h>

#include "common.hpp"

namespace kvactors {

// Appends the integers of `source` to `out`. TypeError for anything but integers (booleans included), ValueError for a
// value below 0 or above 2**32 - 1 or more than one dimension; then `out` is as it was. `what` names a value in messages.
void read_integers(nanobind::handle source, Raw<u32>& out, const char* what);

}  // namespace kvactors
