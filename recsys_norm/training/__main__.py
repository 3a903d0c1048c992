from recsys_norm.training.main import main

if __name__ == "__main__":
    main()
