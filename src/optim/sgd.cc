#define FERRY_METHOD sgd
#include "dispatch-inl.h"
