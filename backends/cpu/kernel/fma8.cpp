// Float32 products in 8 lanes.
#include "divide.h"
#include "fma.h"

void attend_fma8(const Call& call) { attend_all<Fma>(call); }
