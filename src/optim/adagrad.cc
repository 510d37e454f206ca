#define FERRY_METHOD adagrad
#include "dispatch-inl.h"
