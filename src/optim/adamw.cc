#define FERRY_METHOD adamw
#include "dispatch-inl.h"
