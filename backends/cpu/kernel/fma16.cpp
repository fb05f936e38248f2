// Float32 products in 16 lanes.
#include "divide.h"
#include "fma.h"

void attend_fma16(const Call& call) { attend_all<Fma>(call); }
