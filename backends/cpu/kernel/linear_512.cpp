// The products of linear.cpp in registers of AVX-512: the same sums, 16 of them in a register.

#include "linear.cpp"
