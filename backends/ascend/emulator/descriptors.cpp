// The descriptors that aclnn operators receive (part of libopapi.so), laid out for Python to read.
//
// The wheel destroys them as soon as the launch returns, so they are read when the workspace size is asked for.
#include <cstdint>
#include <cstdlib>
#include <cstring>

extern "C" {

struct Tensor {
  int64_t axes, dtype, offset, span;  // span: elements of the memory up to and with the last one
  void* memory;
  int64_t shape[8], strides[8];
  int64_t format, stored[8];  // the storage format, and in an internal one how long the axes of the memory are
};

// FRACTAL_NZ: a matrix as columns of blocks, of 16 rows and 32 bytes each.
constexpr int64_t kNd = 2, kFractal = 29, kRows = 16, kBytes = 32;

struct Array {
  int64_t length;
  int64_t values[1];
};

struct Scalar {
  int64_t dtype;
  char bytes[16];
};

void* aclCreateTensor(const int64_t* shape, uint64_t axes, int dtype, const int64_t* strides, int64_t offset, int format,
                      const int64_t* stored, uint64_t stored_axes, void* memory) {
  auto* made = static_cast<Tensor*>(calloc(1, sizeof(Tensor)));
  made->axes = axes;
  made->dtype = dtype;
  made->offset = offset;
  made->memory = memory;
  made->span = offset + 1;
  for (uint64_t axis = 0; axis < axes; axis++) {
    made->shape[axis] = shape[axis];
    made->strides[axis] = strides ? strides[axis] : 0;
    made->span += (shape[axis] - 1) * made->strides[axis];
  }
  made->format = format;
  if (format == kFractal)
    for (uint64_t axis = 0; axis < stored_axes; axis++) made->stored[axis] = stored[axis];
  return made;
}

static void* array(const void* values, uint64_t length) {
  auto* made = static_cast<Array*>(malloc(sizeof(int64_t) * (length + 1)));
  made->length = length;
  memcpy(made->values, values, sizeof(int64_t) * length);
  return made;
}

// Of a result whose size the device decides; the caller deletes the array.
int aclGetViewShape(const void* tensor, int64_t** shape, uint64_t* axes) {
  auto* found = static_cast<const Tensor*>(tensor);
  *axes = found->axes;
  *shape = new int64_t[found->axes];
  memcpy(*shape, found->shape, sizeof(int64_t) * found->axes);
  return 0;
}

void* aclCreateIntArray(const int64_t* values, uint64_t length) { return array(values, length); }
void* aclCreateTensorList(void* const* values, uint64_t length) { return array(values, length); }

void* aclCreateBoolArray(const bool* values, uint64_t length) {
  auto* made = static_cast<Array*>(calloc(1, sizeof(int64_t) * (length + 1)));
  made->length = length;
  for (uint64_t index = 0; index < length; index++) made->values[index] = values[index];
  return made;
}

// Bytes of a scalar by ACL dtype: 64-bit numbers, then the 16-bit and 8-bit ones; 32 bits otherwise.
static size_t size_of(int dtype) {
  switch (dtype) {
    case 9: case 10: case 11: return 8;
    case 1: case 6: case 7: case 27: return 2;
    case 2: case 4: case 12: return 1;
    default: return 4;
  }
}

// What a cast of format makes of a tensor: 0, or a status where it is not for this dtype.  The caller deletes the array.
int aclnnNpuFormatCastCalculateSizeAndFormat(const void* tensor, int wanted, int, int64_t** shape, uint64_t* axes,
                                             int* format) {
  auto* found = static_cast<const Tensor*>(tensor);
  int64_t bytes = static_cast<int64_t>(size_of(found->dtype)), last = found->axes - 1;
  bool fractal = wanted == kFractal;
  if ((!fractal && wanted != kNd) || bytes > 2 || last < 1) return 161002;
  *format = wanted;
  *axes = found->axes + (fractal ? 2 : 0);
  *shape = new int64_t[*axes];
  memcpy(*shape, found->shape, sizeof(int64_t) * found->axes);
  if (fractal) {
    int64_t wide = kBytes / bytes;
    (*shape)[last - 1] = (found->shape[last] + wide - 1) / wide;
    (*shape)[last] = (found->shape[last - 1] + kRows - 1) / kRows;
    (*shape)[last + 1] = kRows;
    (*shape)[last + 2] = wide;
  }
  return 0;
}

void* aclCreateScalar(void* value, int dtype) {
  auto* made = static_cast<Scalar*>(calloc(1, sizeof(Scalar)));
  made->dtype = dtype;
  memcpy(made->bytes, value, size_of(dtype));
  return made;
}

int aclDestroyTensor(const void* tensor) { free(const_cast<void*>(tensor)); return 0; }

int aclDestroyTensorList(const void* list) {
  if (list)
    for (int64_t index = 0; index < static_cast<const Array*>(list)->length; index++)
      free(reinterpret_cast<void*>(static_cast<const Array*>(list)->values[index]));
  free(const_cast<void*>(list));
  return 0;
}

int aclDestroyIntArray(const void* list) { free(const_cast<void*>(list)); return 0; }
int aclDestroyBoolArray(const void* list) { free(const_cast<void*>(list)); return 0; }
int aclDestroyScalar(const void* scalar) { free(const_cast<void*>(scalar)); return 0; }
int InitHugeMemThreadLocal(void*, bool) { return 0; }
int UnInitHugeMemThreadLocal(void*, bool) { return 0; }
int ReleaseHugeMem(void*, bool) { return 0; }

// A launch: the runtime calls Python when the operator's turn has come.
using Run = int (*)(int64_t executor, int phase, void* workspace, uint64_t bytes);
int emulator_enqueue(void* stream, Run run, int64_t executor, void* workspace, uint64_t bytes);

static Run python;
static int (*python_absent)(int64_t);

void emulator_python(Run run, int (*absent)(int64_t)) {
  python = run;
  python_absent = absent;
}

int emulator_absent(int64_t number) { return python_absent(number); }

int emulator_launch(void* workspace, uint64_t bytes, void* executor, void* stream) {
  return emulator_enqueue(stream, python, reinterpret_cast<int64_t>(executor), workspace, bytes);
}

}  // extern "C"
