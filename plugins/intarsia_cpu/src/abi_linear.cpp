#include "threads.h"
#include "vmath.h"

#define API extern "C" __attribute__((visibility("default")))

API int intarsia_lanes() {
  return isa::LANES;
}
